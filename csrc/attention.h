// Paged attention of one layer: decode, chunked prefill and mixed batches in one kernel.
//
// A *row* is one query token of one head. The rows of a request and KV head are numbered `token * heads_per_group +
// head in group`. Rows that read the same tiles of keys and values form row blocks, and a row block walks the 16-token
// tiles of a block table. Keys are folded in *splits* at fixed absolute positions (0..511, 512..1023, ...): inside a
// split tiles are folded in order with an online softmax, and the splits of a row are merged left to right, always,
// also when one thread does all of them. So the bits of a row depend on its own query, keys and values alone: not on
// which rows share its block, who computes which split, the block size, or where blocks lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_layout.h"

namespace octavo {

constexpr int kSplitTokens = 512;
constexpr int kTilesPerSplit = kSplitTokens / kTileTokens;
constexpr int kMaxRowsPerBlock = 48;  // eight register tiles of six rows: queries, sums and one tile of keys fit in L1

// Where the rows of a step are, and their block tables in one KV group.
struct AttentionBatch {
  int num_requests;
  const int32_t* query_offsets;    // [num_requests + 1]
  const int32_t* start_positions;  // [num_requests]
  const int32_t* block_ids;
  const int32_t* table_offsets;  // [num_requests + 1]

  int num_queries(int request) const { return query_offsets[request + 1] - query_offsets[request]; }
};

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int window;         // tokens a query sees, its own included; 0 for all
  int num_sinks = 0;  // with a window: first tokens that every query sees, too

  // Queries from here on see sinks and window with a gap between them, those before see all before them.
  int first_gap_position() const { return num_sinks + window; }
  bool has_gap(int position) const { return num_sinks > 0 && position >= first_gap_position(); }
  // First position that a query sees beside the sinks.
  int visible_begin(int position) const {
    if (window == 0 || position < first_gap_position()) return 0;
    return position - window + 1;
  }

  int heads_per_group() const { return num_heads / num_kv_heads; }
};

// One Attend op of a step.
struct AttentionCall {
  AttentionShape shape;
  AttentionBatch batch;
  float scale;
  int sparse_tiles;  // tiles of keys that a row reads; 0 for all
  float softcap;     // scores are bounded, softcap * tanh(score / softcap); 0 for no bound
  const float* q;    // rows of the qkv buffer: query heads come first; transformed where the layout is_transformed
  int64_t q_stride;
  float* out;  // [num_tokens, num_heads * head_dim]
  int64_t out_stride;
  const std::byte* pool;
  KvLayout layout;                // of the layer
  const float* sink_q = nullptr;  // with sinks: query heads as they read those
  int64_t sink_q_stride = 0;

  const int32_t* table(int request) const { return batch.block_ids + batch.table_offsets[request]; }
  // The tile that holds a position.
  const std::byte* tile(const int32_t* table, int kv_head, int position) const {
    const int place = position % layout.block_size;
    return pool + layout.keys_offset(table[position / layout.block_size], kv_head, place / kTileTokens);
  }
};

constexpr int kBoundedTiles = 8;  // tiles whose bounds are at hand at once, for all rows
inline int padded_bounds(int head_dim) { return (head_dim + 15) / 16 * 16; }
inline int padded_head_dim(int head_dim) { return (head_dim + 7) / 8 * 8; }

// Floats of scratch that attention needs per thread.
size_t attention_scratch_floats(int head_dim);
// What it needs besides where rows read sparsely, among up to `max_tiles` tiles.
size_t selection_scratch_floats(int head_dim, int64_t max_tiles);

}  // namespace octavo
