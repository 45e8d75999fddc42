// An item in hand, and the sums of its rows; compiled once per instruction set.
#pragma once

#include "attention.h"
#include "attention_schedule.h"
#include "attention_tile.h"
#include "hadamard.h"
#include "tile_selection.h"

namespace octavo::OCTAVO_SIMD {

constexpr float kLog2E = 1.44269504088896341f;

struct Scratch {
  float* q;     // register tiles of [head_dim][rows of the tile], scaled
  float* keys;  // one converted tile
  float* values;
  RowSums split;  // the split being folded
  RowSums total;  // the merge of the splits before it; weights[r][0] is the whole weight
  Selection selection;
};

inline Scratch carve_scratch(float* at, int head_dim) {
  const int dims = padded_head_dim(head_dim);
  Scratch s{};
  const auto take = [&at](int count) {
    float* taken = at;
    at += (count + 15) / 16 * 16;
    return taken;
  };
  s.q = take(kMaxRowsPerBlock * head_dim);
  s.keys = take(kTileTokens * head_dim);
  s.values = take(kTileTokens * head_dim + 8);  // the last row is read in whole vectors
  for (RowSums* sums : {&s.split, &s.total}) {
    sums->sums = take(kMaxRowsPerBlock * dims);
    sums->weights = take(kMaxRowsPerBlock * 8);
    sums->maxima = take(kMaxRowsPerBlock);
  }
  s.selection.queries = at;  // room for it follows where a call reads sparsely
  s.selection.bounds = s.selection.queries + kMaxRowsPerBlock * 2 * padded_bounds(head_dim);
  s.selection.ranks = reinterpret_cast<int32_t*>(s.selection.bounds + kBoundedTiles * 2 * padded_bounds(head_dim));
  return s;
}

// An item in hand: what it is, and which positions its rows see.
struct Work {
  const AttentionCall& call;
  AttentionSchedule& schedule;
  const AttentionItem& item;
  const AttentionRow* rows;
  Visible visible[kMaxRowsPerBlock];
  Visible sinks[kMaxRowsPerBlock];  // empty for rows that see everything before them

  const int32_t* table() const { return call.table(rows[0].request); }  // that all rows read by
  bool is_whole() const { return rows[0].merge < 0; }                   // no other item computes splits of these rows
  int32_t merge_of(int row) const { return rows[row].merge + item.kv_head; }
  bool has_sinks(int row) const { return sinks[row].end > 0; }
};

OCTAVO_INLINE Visible visible_of(const AttentionCall& call, int request, int row) {
  const int position = call.batch.start_positions[request] + row / call.shape.heads_per_group();
  return {call.shape.visible_begin(position), position + 1};
}

// The sinks, for rows that do not see them as part of all before them.
OCTAVO_INLINE Visible sinks_of(const AttentionCall& call, int request, int row) {
  const int position = call.batch.start_positions[request] + row / call.shape.heads_per_group();
  return {0, call.shape.has_gap(position) ? call.shape.num_sinks : 0};
}

// First element of a row in a matrix with a row per token and `head_dim` columns per query head.
OCTAVO_INLINE int64_t element_of(const AttentionCall& call, int kv_head, int request, int row, int64_t stride) {
  const int group = call.shape.heads_per_group();
  const int head = kv_head * group + row % group;
  return (call.batch.query_offsets[request] + row / group) * stride + int64_t(head) * call.shape.head_dim;
}

OCTAVO_INLINE void copy_sums(const float* from, int dims, float* to) {
  for (int d = 0; d < dims; d += 8) store(to + d, load(from + d));
}

inline void clear_sums(const RowSums& rows, int num_rows, int dims) {
  const F8 zero = splat(0.0f);
  for (int64_t i = 0; i < int64_t(num_rows) * dims; i += 8) store(rows.sums + i, zero);
  for (int row = 0; row < num_rows; ++row) {
    store(rows.weights + row * 8, zero);
    rows.maxima[row] = -std::numeric_limits<float>::infinity();
  }
}

// Merges a split of one row into the total of the splits before it.
inline void merge_row(float* total_sums, float& total_weight, float& total_maximum, const float* sums, float weight,
                      float maximum, int dims) {
  const float raised = maximum > total_maximum ? maximum : total_maximum;
  const F8 total_factor = exp2(splat(total_maximum - raised));
  const F8 factor = exp2(splat(maximum - raised));
  for (int d = 0; d < dims; d += 8) {
    store(total_sums + d, mul_add(load(sums + d), factor, load(total_sums + d) * total_factor));
  }
  total_weight = mul_add(splat(weight), factor, splat(total_weight) * total_factor)[0];
  total_maximum = raised;
}

inline void write_output(const AttentionCall& call, int kv_head, int request, int row, const float* sums,
                         float weight) {
  float* out = call.out + element_of(call, kv_head, request, row, call.out_stride);
  const float factor = 1.0f / weight;
  for (int d = 0; d < call.shape.head_dim; ++d) out[d] = sums[d] * factor;
  if (is_transformed(call.layout.type)) hadamard_inverse(out, call.shape.head_dim);
}

}  // namespace octavo::OCTAVO_SIMD
