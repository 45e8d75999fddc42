// The attention kernel, compiled once per instruction set (included by kernels_*.cpp only).
//
// Rows are held in register tiles: with sixteen scores per row, six rows make twelve accumulators of AVX2, and six
// loads of the queries serve two loads of the keys. The number of rows in a tile changes no sum: each score is one
// chain of mul_adds over head_dim, each output element one chain over tokens.
#pragma once

#include <limits>
#include <utility>

#include "attention.h"
#include "half.h"
#include "simd16.h"

namespace octavo::OCTAVO_SIMD {

#if defined(__AVX512F__)
constexpr int kMaxRegisterRows = 12;
constexpr int kAccumulators = 24;  // in vectors of sixteen
#else
constexpr int kMaxRegisterRows = 6;
constexpr int kAccumulators = 6;
#endif
// Scores may exceed the reference maximum by this many powers of two before sums are rescaled: p stays below 256, and
// almost no tile after the first pays for a rescale. Decided per row, so tiling rows together changes no bit.
constexpr float kRescaleAbove = 8.0f;
// From this many rows on a tile of 16-bit keys and values is converted once, instead of by each register tile.
constexpr int kConvertFromRows = 13;

// As std::max and std::min, but of this translation unit: see simd.h on linkage.
OCTAVO_INLINE int greater(int a, int b) { return a < b ? b : a; }
OCTAVO_INLINE int lesser(int a, int b) { return b < a ? b : a; }

struct ElementF32 {
  using Type = float;
  OCTAVO_INLINE F8 load8(const float* p) { return load(p); }
  OCTAVO_INLINE V16 load16(const float* p) { return OCTAVO_SIMD::load16(p); }
};
struct ElementF16 {
  using Type = uint16_t;
  OCTAVO_INLINE F8 load8(const uint16_t* p) { return load_f16(p); }
  OCTAVO_INLINE V16 load16(const uint16_t* p) { return load16_f16(p); }
};
struct ElementBf16 {
  using Type = uint16_t;
  OCTAVO_INLINE F8 load8(const uint16_t* p) { return load_bf16(p); }
  OCTAVO_INLINE V16 load16(const uint16_t* p) { return load16_bf16(p); }
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
                              V16* scores) {
  V16 acc[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r] = splat16(0.0f);
  for (int d = 0; d < head_dim; ++d) {
    if (ahead.is_wanted()) prefetch(ahead, d);
    const V16 k = Element::load16(keys + d * kTileTokens);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) acc[r] = mul_add(splat16(q[d * Rows + r]), k, acc[r]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) scores[r] = acc[r];
}

// Turns the scores of one row into p, updating its maximum and weight.
OCTAVO_INLINE void fold_scores(V16 scores, const RowSums& rows, int row, int dims, float* p) {
  float maximum = rows.maxima[row];
  F8 weight = load(rows.weights + row * 8);
  if (any_above(scores, maximum + kRescaleAbove)) {
    const float raised = greatest(max(low_half(scores), high_half(scores)));
    const F8 factor = exp2(splat(maximum - raised));  // 0 at the first tile, where the maximum is minus infinity
    float* sums = rows.sums + int64_t(row) * dims;
    for (int d = 0; d < dims; d += 8) store(sums + d, load(sums + d) * factor);
    weight = weight * factor;
    rows.maxima[row] = maximum = raised;
  }
  const V16 weights = exp2(scores - splat16(maximum));
  store(rows.weights + row * 8, weight + (low_half(weights) + high_half(weights)));
  store16(p, weights);
}

// Adds tokens [begin, end) of a tile to columns of the output of `Rows` rows, in order of the tokens; the columns are
// `Vectors` vectors of sixteen.
template <class Element, int Rows, int Vectors>
OCTAVO_INLINE void add_value_columns(const float* p, const typename Element::Type* values, int head_dim, float* sums,
                                     int dims, int begin, int end) {
  V16 acc[Rows][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) acc[r][c] = load16(sums + r * dims + c * 16);
  }
  for (int t = begin; t < end; ++t) {
    V16 v[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) v[c] = Element::load16(values + t * head_dim + c * 16);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const V16 factor = splat16(p[r * kTileTokens + t]);
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) acc[r][c] = mul_add(factor, v[c], acc[r][c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) store16(sums + r * dims + c * 16, acc[r][c]);
  }
}

// The same for the last eight columns where head_dim leaves eight.
template <class Element, int Rows>
OCTAVO_INLINE void add_last_columns(const float* p, const typename Element::Type* values, int head_dim, float* sums,
                                    int dims, int begin, int end) {
  F8 acc[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r] = load(sums + r * dims);
  for (int t = begin; t < end; ++t) {
    const F8 v = Element::load8(values + t * head_dim);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) acc[r] = mul_add(splat(p[r * kTileTokens + t]), v, acc[r]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) store(sums + r * dims, acc[r]);
}

template <class Element, int Rows>
OCTAVO_INLINE void add_values(const float* p, const typename Element::Type* values, int head_dim, float* sums, int dims,
                              int begin, int end) {
  // As many vectors as leave the accumulators in registers.
  constexpr int kVectors = Rows * 4 <= kAccumulators ? 4 : Rows * 2 <= kAccumulators ? 2 : 1;
  int d = 0;
  for (; d + kVectors * 16 <= dims; d += kVectors * 16) {
    add_value_columns<Element, Rows, kVectors>(p, values + d, head_dim, sums + d, dims, begin, end);
  }
  for (; d + 16 <= dims; d += 16) {
    add_value_columns<Element, Rows, 1>(p, values + d, head_dim, sums + d, dims, begin, end);
  }
  if (d < dims) add_last_columns<Element, Rows>(p, values + d, head_dim, sums + d, dims, begin, end);
}

// Key positions that one row may see.
struct Visible {
  int begin;
  int end;
};

// One tile of keys and values, and a register tile of rows that visits it.
template <class Element>
struct Visit {
  const float* q;  // [head_dim][rows of the register tile]
  const typename Element::Type* keys;
  const typename Element::Type* values;
  int head_dim;
  int first_position;
  Ahead ahead;
  RowSums rows;
  int row;                 // first of the register tile
  const Visible* visible;  // of the first row
};

// Folds a tile, all of whose tokens all rows see.
template <class Element, int Rows>
void fold_full_tile(const Visit<Element>& visit) {
  const int dims = padded_head_dim(visit.head_dim);
  V16 scores[Rows];
  alignas(64) float p[Rows * kTileTokens];
  score_tile<Element, Rows>(visit.q, visit.keys, visit.head_dim, visit.ahead, scores);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) fold_scores(scores[r], visit.rows, visit.row + r, dims, p + r * kTileTokens);
  add_values<Element, Rows>(p, visit.values, visit.head_dim, visit.rows.sums + int64_t(visit.row) * dims, dims, 0,
                            kTileTokens);
}

// Folds a tile that some rows see in part or not at all. Hidden lanes are removed by select and hidden values are never
// read: they may be NaN.
template <class Element, int Rows>
void fold_edge_tile(const Visit<Element>& visit) {
  const int dims = padded_head_dim(visit.head_dim);
  const V16 hidden = splat16(-std::numeric_limits<float>::infinity());
  V16 scores[Rows];
  alignas(64) float p[kTileTokens];
  score_tile<Element, Rows>(visit.q, visit.keys, visit.head_dim, visit.ahead, scores);
  for (int r = 0; r < Rows; ++r) {
    const int begin = greater(visit.visible[r].begin - visit.first_position, 0);
    const int end = lesser(visit.visible[r].end - visit.first_position, kTileTokens);
    if (begin >= end) continue;
    fold_scores(select_lanes(begin, end, scores[r], hidden), visit.rows, visit.row + r, dims, p);
    add_values<Element, 1>(p, visit.values, visit.head_dim, visit.rows.sums + int64_t(visit.row + r) * dims, dims,
                           begin, end);
  }
}

// The two functions above for every number of rows, the first entry for one row.
template <class Element>
struct FoldTable {
  using Fold = void (*)(const Visit<Element>&);
  Fold full[kMaxRegisterRows];
  Fold edge[kMaxRegisterRows];
};

template <class Element, int... Index>
constexpr FoldTable<Element> fold_table(std::integer_sequence<int, Index...>) {
  return {{fold_full_tile<Element, Index + 1>...}, {fold_edge_tile<Element, Index + 1>...}};
}

// Rows per register tile of a row block: as few tiles as possible, of even size (8 rows are 4 + 4, not 6 + 2).
inline int register_rows(int num_rows) {
  const int num_tiles = (num_rows + kMaxRegisterRows - 1) / kMaxRegisterRows;
  return (num_rows + num_tiles - 1) / num_tiles;
}

// Folds one tile into register tile after register tile of a row block; `visit` is for the first of them.
template <class Element>
void fold_tile(Visit<Element> visit, int num_rows) {
  static constexpr FoldTable<Element> kFolds = fold_table<Element>(std::make_integer_sequence<int, kMaxRegisterRows>());
  const int last_position = visit.first_position + kTileTokens;
  const int width = register_rows(num_rows);
  for (int row = 0; row < num_rows; row += width) {
    const int count = lesser(width, num_rows - row);
    // Rows are in order of their tokens: the first row sees least of the end, the last least of the beginning.
    const Visible first = visit.visible[0];
    const Visible last = visit.visible[count - 1];
    if (last.end > visit.first_position && first.begin < last_position) {
      const bool is_full = first.end >= last_position && last.begin <= visit.first_position;
      (is_full ? kFolds.full : kFolds.edge)[count - 1](visit);
      visit.ahead = {};  // fetched once
    }
    visit.q += count * visit.head_dim;
    visit.row += count;
    visit.visible += count;
  }
}

template <class Element>
OCTAVO_INLINE void convert_tile(const typename Element::Type* from, int count, float* to) {
  for (int i = 0; i < count; i += 16) store16(to + i, Element::load16(from + i));
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
    const int width = lesser(full_width, num_rows - (row - place));
    const int token = (item.row_begin + row) / group;
    const int head = item.kv_head * group + (item.row_begin + row) % group;
    const float* from =
        call.q + (call.batch.query_offsets[item.request] + token) * call.q_stride + int64_t(head) * head_dim;
    float* to = q + (row - place) * head_dim + place;
    for (int d = 0; d < head_dim; ++d) to[d * width] = from[d] * factor;
  }
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
  const int begin = greater(split * kSplitTokens, visible[0].begin / kTileTokens * kTileTokens);
  const int end = lesser((split + 1) * kSplitTokens, visible[num_rows - 1].end);
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
      fold_tile<ElementF32>(
          {scratch.q, scratch.keys, scratch.values, head_dim, position, {}, scratch.split, 0, visible}, num_rows);
    } else {
      Ahead ahead;
      if (position + kTileTokens < visible[num_rows - 1].end) {
        ahead = {tile_at(position + kTileTokens), call.layout.tile_bytes() / size_t(head_dim)};
      }
      fold_tile<Element>({scratch.q, keys, values, head_dim, position, ahead, scratch.split, 0, visible}, num_rows);
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
      copy_sums(sums, dims, total.sums + int64_t(row) * dims);
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
    visible[row].begin = call.shape.window == 0 ? 0 : greater(0, position - call.shape.window + 1);
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
      copy_sums(scratch.split.sums + int64_t(row) * dims, dims, part);
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
