// The attention kernel, compiled once per instruction set (included by kernels_*.cpp only).
//
// Rows are held in register tiles of up to six: with two vectors of scores per row that is twelve accumulators, and
// six loads of the queries serve two loads of the keys. The number of rows in a tile changes no sum: each score is one
// chain of mul_adds over head_dim, each output element one chain over tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "half.h"
#include "simd.h"

namespace octavo::OCTAVO_SIMD {

constexpr int kMaxRegisterRows = 6;
// Scores may exceed the reference maximum by this many powers of two before sums are rescaled: p stays below 256, and
// almost no tile after the first pays for a rescale. Decided per row, so tiling rows together changes no bit.
constexpr float kRescaleAbove = 8.0f;
// From this many rows on a tile of 16-bit keys and values is converted once, instead of by each register tile.
constexpr int kConvertFromRows = 13;

struct ElementF32 {
  using Type = float;
  OCTAVO_INLINE F8 load8(const float* p) { return load(p); }
};
struct ElementF16 {
  using Type = uint16_t;
  OCTAVO_INLINE F8 load8(const uint16_t* p) { return load_f16(p); }
};
struct ElementBf16 {
  using Type = uint16_t;
  OCTAVO_INLINE F8 load8(const uint16_t* p) { return load_bf16(p); }
};

// Running sums of the rows of a row block over one split: p = 2^(score - maximum).
struct RowSums {
  float* sums;     // [rows][padded_head_dim] of p * value
  float* weights;  // [rows][8]: p summed per lane
  float* maxima;   // [rows]: reference of the exponents, not always the true maximum
};

struct Scratch {
  float* q;     // register tiles of [head_dim][rows of the tile], scaled
  float* keys;  // one converted tile
  float* values;
  RowSums split;  // the split being folded
  RowSums total;  // the merge of the splits before it; weights[r][0] is the whole weight
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
  return s;
}

// What to fetch into the cache while a tile is computed: the next tile lies somewhere else in the pool, where no
// hardware prefetcher looks. One tile is as many steps of `step_bytes` as there are dimensions.
struct Ahead {
  const std::byte* tile = nullptr;
  size_t step_bytes = 0;

  bool is_wanted() const { return tile != nullptr; }
};

OCTAVO_INLINE void prefetch(const Ahead& ahead, int step) {
  for (size_t line = 0; line < ahead.step_bytes; line += 64) {
    __builtin_prefetch(ahead.tile + size_t(step) * ahead.step_bytes + line);
  }
}

// Scores of `Rows` rows against a tile of keys.
template <class Element, int Rows>
OCTAVO_INLINE void score_tile(const float* q, const typename Element::Type* keys, int head_dim, Ahead ahead,
                              F8 scores[][2]) {
  F8 acc[Rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int d = 0; d < head_dim; ++d) {
    if (ahead.is_wanted()) prefetch(ahead, d);
    const F8 k0 = Element::load8(keys + d * kTileTokens);
    const F8 k1 = Element::load8(keys + d * kTileTokens + 8);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const F8 factor = splat(q[d * Rows + r]);
      acc[r][0] = mul_add(factor, k0, acc[r][0]);
      acc[r][1] = mul_add(factor, k1, acc[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    scores[r][0] = acc[r][0];
    scores[r][1] = acc[r][1];
  }
}

// Turns the scores of one row into p, updating its maximum and weight.
OCTAVO_INLINE void fold_scores(F8 s0, F8 s1, const RowSums& rows, int row, int dims, float* p) {
  float maximum = rows.maxima[row];
  const F8 higher = max(s0, s1);
  F8 weight = load(rows.weights + row * 8);
  if (any(higher > splat(maximum + kRescaleAbove))) {
    const float raised = greatest(higher);
    const F8 factor = exp2(splat(maximum - raised));  // 0 at the first tile, where the maximum is minus infinity
    float* sums = rows.sums + int64_t(row) * dims;
    for (int d = 0; d < dims; d += 8) store(sums + d, load(sums + d) * factor);
    weight = weight * factor;
    rows.maxima[row] = maximum = raised;
  }
  const F8 p0 = exp2(s0 - splat(maximum));
  const F8 p1 = exp2(s1 - splat(maximum));
  store(rows.weights + row * 8, weight + (p0 + p1));
  store(p, p0);
  store(p + 8, p1);
}

// Adds tokens [begin, end) of a tile to `Vectors` vectors of output of `Rows` rows, in order of the tokens.
template <class Element, int Rows, int Vectors>
OCTAVO_INLINE void add_value_columns(const float* p, const typename Element::Type* values, int head_dim, float* sums,
                                     int dims, int begin, int end) {
  F8 acc[Rows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) acc[r][c] = load(sums + r * dims + c * 8);
  }
  for (int t = begin; t < end; ++t) {
    F8 v[Vectors];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) v[c] = Element::load8(values + t * head_dim + c * 8);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const F8 factor = splat(p[r * kTileTokens + t]);
#pragma GCC unroll 8
      for (int c = 0; c < Vectors; ++c) acc[r][c] = mul_add(factor, v[c], acc[r][c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) store(sums + r * dims + c * 8, acc[r][c]);
  }
}

template <class Element, int Rows>
OCTAVO_INLINE void add_values(const float* p, const typename Element::Type* values, int head_dim, float* sums, int dims,
                              int begin, int end) {
  // As many vectors as leave the accumulators in registers.
  constexpr int kVectors = Rows == 1 ? 8 : Rows <= 3 ? 4 : 2;
  int d = 0;
  for (; d + kVectors * 8 <= dims; d += kVectors * 8) {
    add_value_columns<Element, Rows, kVectors>(p, values + d, head_dim, sums + d, dims, begin, end);
  }
  for (; d < dims; d += 8) {
    add_value_columns<Element, Rows, 1>(p, values + d, head_dim, sums + d, dims, begin, end);
  }
}

// Key positions that one row may see.
struct Visible {
  int begin;
  int end;
};

// Folds one tile, all of whose tokens all rows see.
template <class Element, int Rows>
OCTAVO_INLINE void fold_full_tile(const float* q, const typename Element::Type* keys,
                                  const typename Element::Type* values, int head_dim, Ahead ahead, const RowSums& rows,
                                  int row) {
  const int dims = padded_head_dim(head_dim);
  F8 scores[Rows][2];
  alignas(32) float p[Rows * kTileTokens];
  score_tile<Element, Rows>(q, keys, head_dim, ahead, scores);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) fold_scores(scores[r][0], scores[r][1], rows, row + r, dims, p + r * kTileTokens);
  add_values<Element, Rows>(p, values, head_dim, rows.sums + int64_t(row) * dims, dims, 0, kTileTokens);
}

// Folds one tile that some rows see in part or not at all. Hidden lanes are removed by select and hidden values are
// never read: they may be NaN.
template <class Element, int Rows>
OCTAVO_INLINE void fold_edge_tile(const float* q, const typename Element::Type* keys,
                                  const typename Element::Type* values, int head_dim, Ahead ahead, const RowSums& rows,
                                  int row, int first_position, const Visible* visible) {
  const int dims = padded_head_dim(head_dim);
  const F8 hidden = splat(-std::numeric_limits<float>::infinity());
  const I8 places = {0, 1, 2, 3, 4, 5, 6, 7};
  F8 scores[Rows][2];
  alignas(32) float p[kTileTokens];
  score_tile<Element, Rows>(q, keys, head_dim, ahead, scores);
  for (int r = 0; r < Rows; ++r) {
    const int begin = std::max(visible[r].begin - first_position, 0);
    const int end = std::min(visible[r].end - first_position, kTileTokens);
    if (begin >= end) continue;
    const I8 is_seen0 = (places >= begin) & (places < end);
    const I8 is_seen1 = (places + 8 >= begin) & (places + 8 < end);
    fold_scores(select(is_seen0, scores[r][0], hidden), select(is_seen1, scores[r][1], hidden), rows, row + r, dims, p);
    add_values<Element, 1>(p, values, head_dim, rows.sums + int64_t(row + r) * dims, dims, begin, end);
  }
}

// Rows per register tile of a row block: as few tiles as possible, of even size (8 rows are 4 + 4, not 6 + 2).
inline int register_rows(int num_rows) {
  const int num_tiles = (num_rows + kMaxRegisterRows - 1) / kMaxRegisterRows;
  return (num_rows + num_tiles - 1) / num_tiles;
}

// Folds one tile into register tile after register tile of a row block.
template <class Element>
void fold_tile(const float* q, const typename Element::Type* keys, const typename Element::Type* values, int head_dim,
               Ahead ahead, const RowSums& rows, int num_rows, int first_position, const Visible* visible) {
  const int last_position = first_position + kTileTokens;
  const int width = register_rows(num_rows);
  for (int row = 0; row < num_rows; row += width, q += width * head_dim) {
    const int count = std::min(width, num_rows - row);
    // Rows are in order of their tokens: the first row sees least of the end, the last least of the beginning.
    const Visible& first = visible[row];
    const Visible& last = visible[row + count - 1];
    if (last.end <= first_position || first.begin >= last_position) continue;
    const bool is_full = first.end >= last_position && last.begin <= first_position;
#define OCTAVO_FOLD(ROWS)                                                                                        \
  case ROWS:                                                                                                     \
    if (is_full) {                                                                                               \
      fold_full_tile<Element, ROWS>(q, keys, values, head_dim, ahead, rows, row);                                \
    } else {                                                                                                     \
      fold_edge_tile<Element, ROWS>(q, keys, values, head_dim, ahead, rows, row, first_position, visible + row); \
    }                                                                                                            \
    break;
    switch (count) {
      OCTAVO_FOLD(1)
      OCTAVO_FOLD(2)
      OCTAVO_FOLD(3)
      OCTAVO_FOLD(4)
      OCTAVO_FOLD(5)
      OCTAVO_FOLD(6)
    }
    ahead = {};  // fetched once
#undef OCTAVO_FOLD
  }
}

template <class Element>
OCTAVO_INLINE void convert_tile(const typename Element::Type* from, int count, float* to) {
  for (int i = 0; i < count; i += 8) store(to + i, Element::load8(from + i));
}

// Copies the scaled queries of a row block into register tiles. The factor log2(e) makes exponentials powers of two.
inline void pack_queries(const AttentionCall& call, const AttentionItem& item, float* q) {
  const int head_dim = call.shape.head_dim;
  const int group = call.shape.heads_per_group();
  const float factor = call.scale * 1.44269504088896341f;
  const int num_rows = item.row_end - item.row_begin;
  const int full_width = register_rows(num_rows);
  for (int row = 0; row < num_rows; ++row) {
    const int place = row % full_width;
    const int width = std::min(full_width, num_rows - (row - place));
    const int token = (item.row_begin + row) / group;
    const int head = item.kv_head * group + (item.row_begin + row) % group;
    const float* from =
        call.q + (call.batch.query_offsets[item.request] + token) * call.q_stride + int64_t(head) * head_dim;
    float* to = q + (row - place) * head_dim + place;
    for (int d = 0; d < head_dim; ++d) to[d * width] = from[d] * factor;
  }
}

inline void clear_sums(const RowSums& rows, int num_rows, int dims) {
  std::fill_n(rows.sums, int64_t(num_rows) * dims, 0.0f);
  std::fill_n(rows.weights, num_rows * 8, 0.0f);
  std::fill_n(rows.maxima, num_rows, -std::numeric_limits<float>::infinity());
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

inline void write_output(const AttentionCall& call, const AttentionItem& item, int row, const float* sums,
                         float weight) {
  const int head_dim = call.shape.head_dim;
  const int group = call.shape.heads_per_group();
  const int token = (item.row_begin + row) / group;
  const int head = item.kv_head * group + (item.row_begin + row) % group;
  float* out = call.out + (call.batch.query_offsets[item.request] + token) * call.out_stride + int64_t(head) * head_dim;
  const float factor = 1.0f / weight;
  for (int d = 0; d < head_dim; ++d) out[d] = sums[d] * factor;
}

// Folds the tiles of one split of a row block into cleared sums.
template <class Element>
void fold_split(const AttentionCall& call, const AttentionItem& item, int split, const Visible* visible,
                const Scratch& scratch) {
  using Type = typename Element::Type;
  const int head_dim = call.shape.head_dim;
  const int num_rows = item.row_end - item.row_begin;
  const int block_size = call.layout.block_size;
  const int32_t* table = call.batch.block_ids + call.batch.table_offsets[item.request];
  const int begin = std::max(split * kSplitTokens, visible[0].begin / kTileTokens * kTileTokens);
  const int end = std::min((split + 1) * kSplitTokens, visible[num_rows - 1].end);
  clear_sums(scratch.split, num_rows, padded_head_dim(head_dim));
  const auto tile_at = [&](int position) {
    return call.pool + call.layout.keys_offset(table[position / block_size], call.layer, item.kv_head,
                                               position % block_size / kTileTokens);
  };
  for (int position = begin; position < end; position += kTileTokens) {
    const std::byte* at = tile_at(position);
    const Type* keys = reinterpret_cast<const Type*>(at);
    const Type* values = reinterpret_cast<const Type*>(at + call.layout.values_after_keys());
    if (sizeof(Type) != sizeof(float) && num_rows >= kConvertFromRows) {
      convert_tile<Element>(keys, kTileTokens * head_dim, scratch.keys);
      convert_tile<Element>(values, kTileTokens * head_dim, scratch.values);
      fold_tile<ElementF32>(scratch.q, scratch.keys, scratch.values, head_dim, {}, scratch.split, num_rows, position,
                            visible);
    } else {
      Ahead ahead;
      if (position + kTileTokens < visible[num_rows - 1].end) {
        ahead = {tile_at(position + kTileTokens), call.layout.tile_bytes() / size_t(head_dim)};
      }
      fold_tile<Element>(scratch.q, keys, values, head_dim, ahead, scratch.split, num_rows, position, visible);
    }
  }
}

inline bool sees_split(const Visible& visible, int split) {
  return visible.end > split * kSplitTokens && visible.begin < (split + 1) * kSplitTokens;
}

// Whether the split is the first that a row sees.
inline bool is_first_split(const Visible& visible, int split) { return visible.begin / kSplitTokens == split; }

inline void merge_split(const Scratch& scratch, int num_rows, int dims, int split, const Visible* visible) {
  const RowSums& part = scratch.split;
  const RowSums& total = scratch.total;
  for (int row = 0; row < num_rows; ++row) {
    if (!sees_split(visible[row], split)) continue;
    const float weight = sum(load(part.weights + row * 8));
    const float* sums = part.sums + int64_t(row) * dims;
    if (is_first_split(visible[row], split)) {
      std::copy_n(sums, dims, total.sums + int64_t(row) * dims);
      total.weights[row * 8] = weight;
      total.maxima[row] = part.maxima[row];
    } else {
      merge_row(total.sums + int64_t(row) * dims, total.weights[row * 8], total.maxima[row], sums, weight,
                part.maxima[row], dims);
    }
  }
}

inline float* partial_of(AttentionSchedule& schedule, const AttentionMerge& merge, const AttentionItem& item, int split,
                         int row, int head_dim) {
  const int64_t num_rows = item.row_end - item.row_begin;
  return schedule.partials() + merge.partials +
         ((split - merge.split_begin) * num_rows + row) * partial_floats(head_dim);
}

inline void merge_partials(const AttentionCall& call, const AttentionItem& item, AttentionSchedule& schedule,
                           const Visible* visible) {
  const AttentionMerge& merge = schedule.merge(item.merge);
  const int head_dim = call.shape.head_dim;
  const int dims = padded_head_dim(head_dim);
  for (int row = 0; row < item.row_end - item.row_begin; ++row) {
    float* total = nullptr;
    for (int split = merge.split_begin; split < merge.split_end; ++split) {
      if (!sees_split(visible[row], split)) continue;
      float* part = partial_of(schedule, merge, item, split, row, head_dim);
      if (total == nullptr) {
        total = part;
      } else {
        merge_row(total, total[dims], total[dims + 1], part, part[dims], part[dims + 1], dims);
      }
    }
    write_output(call, item, row, total, total[dims]);
  }
}

template <class Element>
void attend_item(const AttentionCall& call, const AttentionItem& item, AttentionSchedule& schedule,
                 const Scratch& scratch) {
  const int head_dim = call.shape.head_dim;
  const int dims = padded_head_dim(head_dim);
  const int group = call.shape.heads_per_group();
  const int num_rows = item.row_end - item.row_begin;
  Visible visible[kMaxRowsPerBlock];
  for (int row = 0; row < num_rows; ++row) {
    const int position = call.batch.start_positions[item.request] + (item.row_begin + row) / group;
    visible[row].begin = call.shape.window == 0 ? 0 : std::max(0, position - call.shape.window + 1);
    visible[row].end = position + 1;
  }
  pack_queries(call, item, scratch.q);
  for (int split = item.split_begin; split < item.split_end; ++split) {
    fold_split<Element>(call, item, split, visible, scratch);
    if (item.merge < 0) {
      merge_split(scratch, num_rows, dims, split, visible);
      continue;
    }
    for (int row = 0; row < num_rows; ++row) {
      float* part = partial_of(schedule, schedule.merge(item.merge), item, split, row, head_dim);
      std::copy_n(scratch.split.sums + int64_t(row) * dims, dims, part);
      part[dims] = sum(load(scratch.split.weights + row * 8));
      part[dims + 1] = scratch.split.maxima[row];
    }
  }
  if (item.merge < 0) {
    for (int row = 0; row < num_rows; ++row) {
      write_output(call, item, row, scratch.total.sums + int64_t(row) * dims, scratch.total.weights[row * 8]);
    }
  } else if (schedule.finish(item.merge)) {
    merge_partials(call, item, schedule, visible);
  }
}

template <class Element>
void attend_all(const AttentionCall& call, AttentionSchedule& schedule, float* scratch_floats) {
  const Scratch scratch = carve_scratch(scratch_floats, call.shape.head_dim);
  while (const AttentionItem* item = schedule.take()) attend_item<Element>(call, *item, schedule, scratch);
}

inline void attend(const AttentionCall& call, AttentionSchedule& schedule, float* scratch) {
  switch (call.layout.type) {
    case KvType::f32:
      return attend_all<ElementF32>(call, schedule, scratch);
    case KvType::f16:
      return attend_all<ElementF16>(call, schedule, scratch);
    case KvType::bf16:
      return attend_all<ElementBf16>(call, schedule, scratch);
  }
}

}  // namespace octavo::OCTAVO_SIMD
