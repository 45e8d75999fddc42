// Paged attention of one layer: decode, chunked prefill and mixed batches in one kernel.
//
// A *row* is one query token of one head. The rows of a request and KV head are numbered `token * heads_per_group +
// head in group`; consecutive rows form row blocks, and a row block walks the 16-token tiles of its request's block
// table. Keys are folded in *splits* at fixed absolute positions (0..511, 512..1023, ...): inside a split tiles are
// folded in order with an online softmax, and the splits of a row are merged left to right, always, also when one
// thread does all of them. So the bits of a row depend on its own query, keys and values alone: not on which rows
// share its block, who computes which split, the block size, or where blocks lie.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kv_layout.h"

namespace octavo {

constexpr int kSplitTokens = 512;
constexpr int kMaxRowsPerBlock = 48;  // eight register tiles of six rows: queries, sums and one tile of keys fit in L1

// Where the rows of a step are, and their block tables in one KV group.
struct AttentionBatch {
  int num_requests;
  const int32_t* query_offsets;    // [num_requests + 1]
  const int32_t* start_positions;  // [num_requests]
  const int32_t* block_ids;
  const int32_t* table_offsets;  // [num_requests + 1]
};

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int window;  // tokens a query sees, its own included; 0 for all

  int heads_per_group() const { return num_heads / num_kv_heads; }
};

// One Attend op of a step.
struct AttentionCall {
  AttentionShape shape;
  AttentionBatch batch;
  float scale;
  const float* q;  // rows of the qkv buffer: query heads come first
  int64_t q_stride;
  float* out;  // [num_tokens, num_heads * head_dim]
  int64_t out_stride;
  const std::byte* pool;
  KvLayout layout;
  int layer;  // within its group
};

// A piece of work: some rows of one request and KV head against some splits.
struct AttentionItem {
  int32_t request;
  int32_t kv_head;
  int32_t row_begin;
  int32_t row_end;
  int32_t split_begin;
  int32_t split_end;
  int32_t merge;  // index into the merges of the schedule, or -1: the item covers all splits of its rows
  int64_t cost;
};

// Rows whose splits several items compute; whoever finishes last merges them.
struct AttentionMerge {
  int32_t split_begin;
  int32_t split_end;
  int32_t num_items;
  int64_t partials;  // first float of its area: per split and row the head_dim sums, then maximum and weight
};

inline int padded_head_dim(int head_dim) { return (head_dim + 7) / 8 * 8; }
inline int64_t partial_floats(int head_dim) { return padded_head_dim(head_dim) + 8; }

// The division of a step's attention among the threads; made once per step and KV group, used by all its layers.
//
// All memory is taken in the constructor. Row blocks are split along the keys only while the partial sums fit into
// `kPartialFloats`; what does not fit is computed by one thread, with the same bits.
class AttentionSchedule {
 public:
  AttentionSchedule(AttentionShape shape, int max_tokens, int max_requests, int num_threads);

  void build(const AttentionBatch& batch);
  // Called by one thread between two barriers, before each use of the schedule.
  void rewind() { next_.store(0, std::memory_order_relaxed); }
  // The next item, or null when none is left.
  const AttentionItem* take();
  // Whether the caller finished the last item of the merge, so that all partial sums are there.
  bool finish(int32_t merge);

  const AttentionMerge& merge(int32_t index) const { return merges_[static_cast<size_t>(index)]; }
  float* partials() { return partials_.get(); }
  size_t num_items() const { return items_.size(); }
  size_t resident_bytes() const;

 private:
  void add_rows(const AttentionBatch& batch, int request, int rows_per_block);
  bool add_split_rows(AttentionItem whole, int64_t target_cost);

  AttentionShape shape_;
  int num_threads_;
  int64_t num_partial_floats_;
  int64_t used_partial_floats_ = 0;
  std::vector<AttentionItem> items_;
  std::vector<AttentionMerge> merges_;
  std::unique_ptr<std::atomic<int32_t>[]> num_left_;
  std::unique_ptr<float[]> partials_;
  std::atomic<int64_t> next_{0};
};

// Floats of scratch that `attend` of a kernel table needs per thread.
size_t attention_scratch_floats(int head_dim);

}  // namespace octavo
