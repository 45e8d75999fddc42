// One 16-token tile of keys and values, folded into rows; compiled once per instruction set.
//
// Rows are held in register tiles: with sixteen scores per row, six rows make twelve accumulators of AVX2, and six
// loads of the queries serve two loads of the keys. The number of rows in a tile changes no sum: each score is one
// chain of mul_adds over head_dim, each output element one chain over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "attention.h"
#include "kv_levels.h"
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

// As std::max and std::min, but of this translation unit: see simd.h on linkage.
OCTAVO_INLINE int greater(int a, int b) { return a < b ? b : a; }
OCTAVO_INLINE int lesser(int a, int b) { return b < a ? b : a; }

// How keys and values of a type are read. `kNumbers` numbers lie in one item: as many dimensions of a key.
struct ElementF32 {
  using Type = float;
  static constexpr int kNumbers = 1;
  static constexpr bool kIsScaled = false;
  OCTAVO_INLINE F8 load8(const float* p) { return load(p); }
  OCTAVO_INLINE V16 load16(const float* p) { return OCTAVO_SIMD::load16(p); }
  OCTAVO_INLINE void load_keys(const float* p, V16* keys) { keys[0] = load16(p); }
};
struct ElementF16 {
  using Type = uint16_t;
  static constexpr int kNumbers = 1;
  static constexpr bool kIsScaled = false;
  OCTAVO_INLINE F8 load8(const uint16_t* p) { return load_f16(p); }
  OCTAVO_INLINE V16 load16(const uint16_t* p) { return load16_f16(p); }
  OCTAVO_INLINE void load_keys(const uint16_t* p, V16* keys) { keys[0] = load16(p); }
};
struct ElementBf16 {
  using Type = uint16_t;
  static constexpr int kNumbers = 1;
  static constexpr bool kIsScaled = false;
  OCTAVO_INLINE F8 load8(const uint16_t* p) { return load_bf16(p); }
  OCTAVO_INLINE V16 load16(const uint16_t* p) { return load16_bf16(p); }
  OCTAVO_INLINE void load_keys(const uint16_t* p, V16* keys) { keys[0] = load16(p); }
};
// Codes are read as levels; the scales of the tokens are multiplied into scores and weights, once per tile and row.
struct ElementInt8 {
  using Type = uint8_t;
  static constexpr int kNumbers = 1;
  static constexpr bool kIsScaled = true;
  OCTAVO_INLINE F8 load8(const uint8_t* p) { return int8_levels8(p); }
  OCTAVO_INLINE V16 load16(const uint8_t* p) { return int8_levels16(p); }
  OCTAVO_INLINE void load_keys(const uint8_t* p, V16* keys) { keys[0] = load16(p); }
};
struct ElementE4m3 {
  using Type = uint8_t;
  static constexpr int kNumbers = 1;
  static constexpr bool kIsScaled = true;
  OCTAVO_INLINE F8 load8(const uint8_t* p) { return e4m3_levels8(p); }
  OCTAVO_INLINE V16 load16(const uint8_t* p) { return e4m3_levels16(p); }
  OCTAVO_INLINE void load_keys(const uint8_t* p, V16* keys) { keys[0] = load16(p); }
};
struct ElementInt4 {
  using Type = uint8_t;
  static constexpr int kNumbers = 2;
  static constexpr bool kIsScaled = true;
  OCTAVO_INLINE F8 load8(const uint8_t* p) { return int4_levels8(p); }
  OCTAVO_INLINE V16 load16(const uint8_t* p) { return int4_levels16(p); }
  OCTAVO_INLINE void load_keys(const uint8_t* p, V16* keys) { int4_level_pairs(p, keys); }
};
// Levels that were read before.
struct ElementLevels : ElementF32 {
  static constexpr bool kIsScaled = true;
};

// Running sums of the rows of a row block over one split: p = 2^(score - maximum).
struct RowSums {
  float* sums;     // [rows][padded_head_dim] of p * value
  float* weights;  // [rows][8]: p summed per lane
  float* maxima;   // [rows]: reference of the exponents, not always the true maximum
};

// What to fetch while a tile is computed: the next tile lies somewhere else in the pool, where no hardware prefetcher
// looks. Each step of the scores fetches `step_bytes`, until all is. Into the second-level cache: that was 13 % quicker
// than into the first, which has fewer requests to memory under way at once.
struct Ahead {
  const std::byte* tile = nullptr;
  size_t step_bytes = 0;  // whole cache lines
  size_t tile_bytes = 0;

  bool is_wanted() const { return tile != nullptr; }
};

inline Ahead ahead_of(const std::byte* tile, size_t tile_bytes, int num_steps) {
  const size_t step_bytes = (tile_bytes + size_t(num_steps) - 1) / size_t(num_steps);
  return {tile, (step_bytes + 63) / 64 * 64, tile_bytes};
}

OCTAVO_INLINE void prefetch(const Ahead& ahead, int step) {
  const size_t begin = size_t(step) * ahead.step_bytes;
  if (begin >= ahead.tile_bytes) return;
  for (size_t line = 0; line < ahead.step_bytes; line += 64) __builtin_prefetch(ahead.tile + begin + line, 0, 2);
}

// Scores of `Rows` rows against a tile of keys.
template <class Element, int Rows>
OCTAVO_INLINE void score_tile(const float* q, const typename Element::Type* keys, const uint16_t* scales, int head_dim,
                              Ahead ahead, V16* scores) {
  constexpr int kNumbers = Element::kNumbers;
  V16 acc[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r] = splat16(0.0f);
  for (int i = 0; i < head_dim / kNumbers; ++i) {
    if (ahead.is_wanted()) prefetch(ahead, i);
    V16 k[kNumbers];
    Element::load_keys(keys + i * kTileTokens, k);
#pragma GCC unroll 2
    for (int j = 0; j < kNumbers; ++j) {
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) acc[r] = mul_add(splat16(q[(i * kNumbers + j) * Rows + r]), k[j], acc[r]);
    }
  }
  if constexpr (Element::kIsScaled) {
    const V16 scale = load16_bf16(scales);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) scores[r] = acc[r] * scale;
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) scores[r] = acc[r];
  }
}

// Bounds scores: bound * tanh(score / bound), both as exponents of two. tanh(z) = 1 - 2 / (1 + e^2z).
// Rare, and so done in halves, with the same operations in every instruction set.
template <int Rows>
OCTAVO_INLINE void bound_scores(V16* scores, float bound) {
  const auto bounded = [bound](F8 x) {
    const F8 exponents = min(x * splat(2.0f * 1.44269504088896341f / bound), splat(126.0f));  // beyond, tanh is 1
    return splat(bound) - splat(2.0f * bound) / (splat(1.0f) + exp2(exponents));
  };
  for (int r = 0; r < Rows; ++r) scores[r] = join(bounded(low_half(scores[r])), bounded(high_half(scores[r])));
}

// Turns the scores of one row into p, updating its maximum and weight. What goes to `p` is for the values' levels: each
// token's scale is in it, and not in the weight.
template <class Element>
OCTAVO_INLINE void fold_scores(V16 scores, const uint16_t* value_scales, const RowSums& rows, int row, int dims,
                               float* p) {
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
  if constexpr (Element::kIsScaled) {
    store16(p, weights * load16_bf16(value_scales));
  } else {
    store16(p, weights);
  }
}

// Adds tokens [begin, end) of a tile to columns of the output of `Rows` rows, in order of the tokens; the columns are
// `Vectors` vectors of sixteen.
template <class Element, int Rows, int Vectors>
OCTAVO_INLINE void add_value_columns(const float* p, const typename Element::Type* values, int row_items, float* sums,
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
    for (int c = 0; c < Vectors; ++c) v[c] = Element::load16(values + t * row_items + c * (16 / Element::kNumbers));
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
OCTAVO_INLINE void add_last_columns(const float* p, const typename Element::Type* values, int row_items, float* sums,
                                    int dims, int begin, int end) {
  F8 acc[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) acc[r] = load(sums + r * dims);
  for (int t = begin; t < end; ++t) {
    const F8 v = Element::load8(values + t * row_items);
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
  const int row_items = head_dim / Element::kNumbers;
  int d = 0;
  for (; d + kVectors * 16 <= dims; d += kVectors * 16) {
    add_value_columns<Element, Rows, kVectors>(p, values + d / Element::kNumbers, row_items, sums + d, dims, begin,
                                               end);
  }
  for (; d + 16 <= dims; d += 16) {
    add_value_columns<Element, Rows, 1>(p, values + d / Element::kNumbers, row_items, sums + d, dims, begin, end);
  }
  if (d < dims) {
    add_last_columns<Element, Rows>(p, values + d / Element::kNumbers, row_items, sums + d, dims, begin, end);
  }
}

// Key positions that one row may see.
struct Visible {
  int begin = 0;
  int end = 0;
};

// One tile of keys and values, and a register tile of rows that visits it.
template <class Element>
struct Visit {
  const float* q;  // [head_dim][rows of the register tile]
  const typename Element::Type* keys;
  const typename Element::Type* values;
  const uint16_t* key_scales;  // of the 16 tokens, as bf16; null where numbers are whole
  const uint16_t* value_scales;
  int head_dim;
  int first_position;
  float score_bound;  // as an exponent of two; 0 for none
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
  score_tile<Element, Rows>(visit.q, visit.keys, visit.key_scales, visit.head_dim, visit.ahead, scores);
  if (visit.score_bound > 0.0f) bound_scores<Rows>(scores, visit.score_bound);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    fold_scores<Element>(scores[r], visit.value_scales, visit.rows, visit.row + r, dims, p + r * kTileTokens);
  }
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
  score_tile<Element, Rows>(visit.q, visit.keys, visit.key_scales, visit.head_dim, visit.ahead, scores);
  if (visit.score_bound > 0.0f) bound_scores<Rows>(scores, visit.score_bound);
  for (int r = 0; r < Rows; ++r) {
    const int begin = greater(visit.visible[r].begin - visit.first_position, 0);
    const int end = lesser(visit.visible[r].end - visit.first_position, kTileTokens);
    if (begin >= end) continue;
    fold_scores<Element>(select_lanes(begin, end, scores[r], hidden), visit.value_scales, visit.rows, visit.row + r,
                         dims, p);
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
    bool is_seen = false, is_full = true;
    for (int i = 0; i < count; ++i) {
      const Visible& visible = visit.visible[i];
      is_seen |= visible.end > visit.first_position && visible.begin < last_position;
      is_full &= visible.end >= last_position && visible.begin <= visit.first_position;
    }
    if (is_seen) {
      (is_full ? kFolds.full : kFolds.edge)[count - 1](visit);
      visit.ahead = {};  // fetched once
    }
    visit.q += count * visit.head_dim;
    visit.row += count;
    visit.visible += count;
  }
}

}  // namespace octavo::OCTAVO_SIMD
