// The attention kernel, compiled once per instruction set (included by kernels_*.cpp only): items of a schedule, their
// splits, and the merging of splits. What happens to one tile is in attention_tile.h.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <type_traits>

#include "attention.h"
#include "attention_schedule.h"
#include "attention_tile.h"
#include "hadamard.h"

namespace octavo::OCTAVO_SIMD {

// Rounds to bf16, up or down.
OCTAVO_INLINE uint16_t outward_bf16(float value, bool is_up) {
  const uint32_t bits = bits_of(value);
  const bool is_negative = bits >> 31 != 0;
  // Cutting bits off goes toward zero; away from it is one step on.
  const bool is_away = (bits & 0xffff) != 0 && is_negative != is_up && (bits & 0x7f800000) != 0x7f800000;
  return static_cast<uint16_t>((bits >> 16) + (is_away ? 1 : 0));
}

constexpr float kLog2E = 1.44269504088896341f;

// From this many rows on a tile of 16-bit keys and values is converted once, instead of by each register tile.
constexpr int kConvertFromRows = 13;

// How many tiles ahead bounds are fetched: a few hundred cycles of work.
constexpr int kBoundsAhead = 8;

// Which tiles each row of an item reads: a word per split, whose tiles are as many as its bits.
struct Selection {
  float* bounds;    // [rows][tiles], and one row more to find a threshold
  uint32_t* words;  // [rows][num_words]
  int num_words;

  // Tiles of a split that any of the rows reads.
  uint32_t wanted(int num_rows, int split) const {
    uint32_t any = 0;
    for (int i = 0; i < num_rows; ++i) any |= words[i * num_words + split];
    return any;
  }
};
static_assert(kSplitTokens / kTileTokens == 32, "a word of a selection covers a split");

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
  s.selection.bounds = at;  // room for it follows where a call reads sparsely
  return s;
}

// An item in hand: what it is, and which positions its rows see.
struct Work {
  const AttentionCall& call;
  AttentionSchedule& schedule;
  const AttentionItem& item;
  const AttentionRow* rows;
  Visible visible[kMaxRowsPerBlock];
  bool is_sparse = false;           // rows read the tiles of their selection only
  Visible sinks[kMaxRowsPerBlock];  // empty for rows that see everything before them

  bool is_whole() const { return rows[0].merge < 0; }  // no other item computes splits of these rows
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

// Copies the scaled queries of a row block into register tiles. The factor log2(e) makes exponentials powers of two.
inline void pack_queries(const Work& work, const float* queries, int64_t stride, float* q) {
  const int head_dim = work.call.shape.head_dim;
  const float factor = work.call.scale * kLog2E;
  const int num_rows = work.item.num_rows;
  const int full_width = register_rows(num_rows);
  for (int i = 0; i < num_rows; ++i) {
    const AttentionRow& row = work.rows[i];
    const float* from = queries + element_of(work.call, work.item.kv_head, row.request, row.row, stride);
    const int place = i % full_width;
    const int width = lesser(full_width, num_rows - (i - place));
    float* to = q + (i - place) * head_dim + place;
    for (int d = 0; d < head_dim; ++d) to[d * width] = from[d] * factor;
  }
}

// The most that q.k can be for a key of a tile.
inline float bound_of(const float* q, const uint16_t* bounds, int head_dim) {
  const uint16_t* lows = bounds;
  const uint16_t* highs = bounds + head_dim;
  F8 sums = splat(0.0f);
  int d = 0;
  for (; d + 8 <= head_dim; d += 8) {
    const F8 v = load(q + d);
    sums = mul_add(v, select(v < splat(0.0f), load_bf16(lows + d), load_bf16(highs + d)), sums);
  }
  float bound = sum(sums);
  for (; d < head_dim; ++d) bound += q[d] * f32_of_bf16(q[d] < 0.0f ? lows[d] : highs[d]);
  return bound == bound ? bound : std::numeric_limits<float>::infinity();
}

// Chooses the tiles that the rows of an item read; returns whether any row leaves some out. By row: the first tile, its
// own, and those before it with the highest bounds, the lower tile where two are equal.
inline bool select_tiles(const Work& work, Selection& selection) {
  const AttentionCall& call = work.call;
  const KvLayout& layout = call.layout;
  const int num_rows = work.item.num_rows;
  const int num_tiles = (work.visible[num_rows - 1].end + kTileTokens - 1) / kTileTokens;
  if (num_tiles <= call.sparse_tiles) return false;
  const int num_chosen = call.sparse_tiles - 2;
  float* sorted = selection.bounds + int64_t(num_rows) * num_tiles;
  selection.num_words = (num_tiles + 31) / 32;
  selection.words = reinterpret_cast<uint32_t*>(sorted + num_tiles);
  const int32_t* table = call.batch.block_ids + call.batch.table_offsets[work.rows[0].request];
  const auto bounds_at = [&](int tile) {
    const int position = tile * kTileTokens;
    const std::byte* keys = call.pool + layout.keys_offset(table[position / layout.block_size], work.item.kv_head,
                                                           position % layout.block_size / kTileTokens);
    return reinterpret_cast<const uint16_t*>(keys + layout.bounds_after_keys());
  };
  const auto own_of = [&](int row) { return (work.visible[row].end - 1) / kTileTokens; };
  // Tile by tile, so that each tile's bounds are fetched once for all rows; they lie far from each other.
  for (int tile = 1; tile < num_tiles - 1; ++tile) {
    if (tile + kBoundsAhead < num_tiles) {
      const std::byte* ahead = reinterpret_cast<const std::byte*>(bounds_at(tile + kBoundsAhead));
      for (size_t line = 0; line < layout.bounds_bytes(); line += 64) __builtin_prefetch(ahead + line, 0, 2);
    }
    const uint16_t* bounds = bounds_at(tile);
    for (int i = 0; i < num_rows; ++i) {
      const AttentionRow& row = work.rows[i];
      if (tile >= own_of(i)) continue;
      const float* q = call.q + element_of(call, work.item.kv_head, row.request, row.row, call.q_stride);
      selection.bounds[int64_t(i) * num_tiles + tile] = bound_of(q, bounds, layout.head_dim);
    }
  }
  for (int i = 0; i < num_rows; ++i) {
    const float* bounds = selection.bounds + int64_t(i) * num_tiles;
    uint32_t* words = selection.words + i * selection.num_words;
    const int own = own_of(i);
    std::fill_n(words, selection.num_words, own < call.sparse_tiles ? ~uint32_t(0) : uint32_t(0));
    if (own < call.sparse_tiles) continue;  // all are read; what is not visible is left out anyway
    std::copy(bounds + 1, bounds + own, sorted);
    std::nth_element(sorted, sorted + (num_chosen - 1), sorted + (own - 1), std::greater<float>());
    const float least = sorted[num_chosen - 1];
    int num_equal = num_chosen;  // of those that are as high as the least chosen one, how many are chosen
    for (int tile = 1; tile < own; ++tile) num_equal -= bounds[tile] > least;
    const auto choose = [words](int tile) { words[tile / 32] |= uint32_t(1) << (tile % 32); };
    choose(0);
    choose(own);
    for (int tile = 1; tile < own; ++tile) {
      if (bounds[tile] > least || (bounds[tile] == least && num_equal-- > 0)) choose(tile);
    }
  }
  return true;
}

// Least and greatest of the keys of a whole tile, rounded outward to bf16. NaN counts for nothing.
template <class Element>
void bound_tile_of(const KvLayout& layout, std::byte* tile) {
  const auto* keys = reinterpret_cast<const typename Element::Type*>(tile);
  const auto* scales = reinterpret_cast<const uint16_t*>(tile + layout.key_scales_after_keys());
  uint16_t* lows = reinterpret_cast<uint16_t*>(tile + layout.bounds_after_keys());
  uint16_t* highs = lows + layout.head_dim;
  for (int i = 0; i < layout.head_dim / Element::kNumbers; ++i) {
    V16 levels[Element::kNumbers];
    Element::load_keys(keys + i * kTileTokens, levels);
    for (int j = 0; j < Element::kNumbers; ++j) {
      alignas(64) float each[kTileTokens];
      store16(each, levels[j]);
      float low = std::numeric_limits<float>::infinity(), high = -low;
      for (int t = 0; t < kTileTokens; ++t) {
        const float key = Element::kIsScaled ? each[t] * f32_of_bf16(scales[t]) : each[t];
        low = key < low ? key : low;
        high = key > high ? key : high;
      }
      lows[i * Element::kNumbers + j] = outward_bf16(low, false);
      highs[i * Element::kNumbers + j] = outward_bf16(high, true);
    }
  }
}

inline void bound_tile(const KvLayout& layout, std::byte* tile) {
  switch (layout.type) {
    case KvType::f32:
      return bound_tile_of<ElementF32>(layout, tile);
    case KvType::f16:
      return bound_tile_of<ElementF16>(layout, tile);
    case KvType::bf16:
      return bound_tile_of<ElementBf16>(layout, tile);
    case KvType::int8:
      return bound_tile_of<ElementInt8>(layout, tile);
    case KvType::fp8_e4m3:
      return bound_tile_of<ElementE4m3>(layout, tile);
    case KvType::int4:
      return bound_tile_of<ElementInt4>(layout, tile);
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

inline void write_output(const AttentionCall& call, int kv_head, int request, int row, const float* sums,
                         float weight) {
  float* out = call.out + element_of(call, kv_head, request, row, call.out_stride);
  const float factor = 1.0f / weight;
  for (int d = 0; d < call.shape.head_dim; ++d) out[d] = sums[d] * factor;
  if (is_transformed(call.layout.type)) hadamard_inverse(out, call.shape.head_dim);
}

template <class Element>
OCTAVO_INLINE void convert_keys(const typename Element::Type* from, int head_dim, float* to) {
  for (int i = 0; i < head_dim / Element::kNumbers; ++i) {
    V16 keys[Element::kNumbers];
    Element::load_keys(from + i * kTileTokens, keys);
    for (int j = 0; j < Element::kNumbers; ++j) store16(to + (i * Element::kNumbers + j) * kTileTokens, keys[j]);
  }
}

template <class Element>
OCTAVO_INLINE void convert_values(const typename Element::Type* from, int head_dim, float* to) {
  for (int i = 0; i < kTileTokens * head_dim; i += 16) store16(to + i, Element::load16(from + i / Element::kNumbers));
}

// What a converted tile is read as.
template <class Element>
using Converted = std::conditional_t<Element::kIsScaled, ElementLevels, ElementF32>;

// Folds the tiles from `first` to `last` of which rows see something into cleared sums.
template <class Element>
void fold_range(const Work& work, const Visible* visible, int first, int last, int ahead_end, const Scratch& scratch) {
  using Type = typename Element::Type;
  const AttentionCall& call = work.call;
  const KvLayout& layout = call.layout;
  const int head_dim = call.shape.head_dim;
  const int num_rows = work.item.num_rows;
  const float bound = call.softcap * kLog2E;
  const int block_size = layout.block_size;
  const int32_t* table = call.batch.block_ids + call.batch.table_offsets[work.rows[0].request];
  // Rows of one request ascend; rows of several see the whole split.
  const int last_end = visible[num_rows - 1].end;
  const int begin = greater(first, visible[0].begin / kTileTokens * kTileTokens);
  const int end = lesser(last, last_end);
  const auto tile_at = [&](int position) {
    return call.pool +
           layout.keys_offset(table[position / block_size], work.item.kv_head, position % block_size / kTileTokens);
  };
  clear_sums(scratch.split, num_rows, padded_head_dim(head_dim));
  const Selection& selection = scratch.selection;
  const int split = first / kSplitTokens;
  const uint32_t wanted = work.is_sparse ? selection.wanted(num_rows, split) : ~uint32_t(0);
  Visible chosen[kMaxRowsPerBlock];
  for (int position = begin; position < end; position += kTileTokens) {
    const int tile = position % kSplitTokens / kTileTokens;
    if ((wanted >> tile & 1) == 0) continue;
    const Visible* readers = visible;
    if (work.is_sparse) {
      for (int i = 0; i < num_rows; ++i) {
        chosen[i] = (selection.words[i * selection.num_words + split] >> tile & 1) != 0 ? visible[i] : Visible{};
      }
      readers = chosen;
    }
    const std::byte* at = tile_at(position);
    const Type* keys = reinterpret_cast<const Type*>(at);
    const Type* values = reinterpret_cast<const Type*>(at + layout.values_after_keys());
    const uint16_t* key_scales = reinterpret_cast<const uint16_t*>(at + layout.key_scales_after_keys());
    const uint16_t* value_scales = reinterpret_cast<const uint16_t*>(at + layout.value_scales_after_keys());
    if (sizeof(Type) != sizeof(float) && num_rows >= kConvertFromRows) {
      convert_keys<Element>(keys, head_dim, scratch.keys);
      convert_values<Element>(values, head_dim, scratch.values);
      fold_tile<Converted<Element>>({scratch.q,
                                     scratch.keys,
                                     scratch.values,
                                     key_scales,
                                     value_scales,
                                     head_dim,
                                     position,
                                     bound,
                                     {},
                                     scratch.split,
                                     0,
                                     readers},
                                    num_rows);
    } else {
      Ahead ahead;
      if (work.is_sparse) {
        const uint32_t later = tile == 31 ? 0 : wanted >> (tile + 1);
        const int next = position + kTileTokens * (later == 0 ? 0 : 1 + std::countr_zero(later));
        if (later != 0 && next < end)
          ahead = ahead_of(tile_at(next), layout.tile_bytes(), head_dim / Element::kNumbers);
      } else if (position + kTileTokens < lesser(last_end, ahead_end)) {
        ahead = ahead_of(tile_at(position + kTileTokens), layout.tile_bytes(), head_dim / Element::kNumbers);
      }
      fold_tile<Element>({scratch.q, keys, values, key_scales, value_scales, head_dim, position, bound, ahead,
                          scratch.split, 0, readers},
                         num_rows);
    }
  }
}

template <class Element>
void fold_split(const Work& work, int split, const Scratch& scratch) {
  fold_range<Element>(work, work.visible, split * kSplitTokens, (split + 1) * kSplitTokens,
                      work.item.split_end * kSplitTokens, scratch);
}

OCTAVO_INLINE bool sees_split(const Visible& visible, int split) {
  return visible.end > split * kSplitTokens && visible.begin < (split + 1) * kSplitTokens;
}

// Merges a split into the totals of an item that has its rows to itself.
inline void merge_split(const Work& work, int split, const Scratch& scratch) {
  const int dims = padded_head_dim(work.call.shape.head_dim);
  const RowSums& part = scratch.split;
  const RowSums& total = scratch.total;
  for (int row = 0; row < work.item.num_rows; ++row) {
    if (!sees_split(work.visible[row], split)) continue;
    const float weight = sum(load(part.weights + row * 8));
    const float* sums = part.sums + int64_t(row) * dims;
    if (!work.has_sinks(row) && work.visible[row].begin / kSplitTokens == split) {  // the first that the row sees
      copy_sums(sums, dims, total.sums + int64_t(row) * dims);
      total.weights[row * 8] = weight;
      total.maxima[row] = part.maxima[row];
    } else {
      merge_row(total.sums + int64_t(row) * dims, total.weights[row * 8], total.maxima[row], sums, weight,
                part.maxima[row], dims);
    }
  }
}

inline float* partial_of(const Work& work, const AttentionMerge& merge, int split, int row) {
  const int64_t num_rows = merge.row_end - merge.row_begin;
  const int64_t index = (split - merge.split_begin) * num_rows + row - merge.row_begin;
  return work.schedule.partials() + merge.partials + index * partial_floats(work.call.shape.head_dim);
}

// The sinks come before the first split.
inline void begin_with_sinks(const Work& work, const Scratch& scratch) {
  const int dims = padded_head_dim(work.call.shape.head_dim);
  for (int row = 0; row < work.item.num_rows; ++row) {
    if (!work.has_sinks(row)) continue;
    copy_sums(scratch.split.sums + int64_t(row) * dims, dims, scratch.total.sums + int64_t(row) * dims);
    scratch.total.weights[row * 8] = sum(load(scratch.split.weights + row * 8));
    scratch.total.maxima[row] = scratch.split.maxima[row];
  }
}

// Leaves a split for whoever finishes last; the sinks lie where one more split would.
inline void store_partials(const Work& work, int split, const Scratch& scratch) {
  const int dims = padded_head_dim(work.call.shape.head_dim);
  for (int i = 0; i < work.item.num_rows; ++i) {
    float* part = partial_of(work, work.schedule.merge(work.merge_of(i)), split, work.rows[i].row);
    copy_sums(scratch.split.sums + int64_t(i) * dims, dims, part);
    part[dims] = sum(load(scratch.split.weights + i * 8));
    part[dims + 1] = scratch.split.maxima[i];
  }
}

inline void merge_partials(const Work& work, const AttentionMerge& merge) {
  const int dims = padded_head_dim(work.call.shape.head_dim);
  for (int row = merge.row_begin; row < merge.row_end; ++row) {
    const Visible visible = visible_of(work.call, merge.request, row);
    const bool has_sinks = sinks_of(work.call, merge.request, row).end > 0;
    float* total = has_sinks ? partial_of(work, merge, merge.split_end, row) : nullptr;
    for (int split = merge.split_begin; split < merge.split_end; ++split) {
      if (!sees_split(visible, split)) continue;
      float* part = partial_of(work, merge, split, row);
      if (total == nullptr) {
        total = part;
      } else {
        merge_row(total, total[dims], total[dims + 1], part, part[dims], part[dims + 1], dims);
      }
    }
    write_output(work.call, merge.kv_head, merge.request, row, total, total[dims]);
  }
}

// Folds the sinks, with queries of their own, where the item computes the first splits of its rows.
template <class Element>
void attend_sinks(const Work& work, const Scratch& scratch) {
  // Rows of several requests never come with a window, so all rows have the same merge.
  const int32_t merge_index = work.merge_of(0);
  const AttentionMerge* merge = work.is_whole() ? nullptr : &work.schedule.merge(merge_index);
  if (merge != nullptr && work.item.split_begin != merge->split_begin) return;
  const int num_sinks = work.call.shape.num_sinks;
  pack_queries(work, work.call.sink_q, work.call.sink_q_stride, scratch.q);
  fold_range<Element>(work, work.sinks, 0, num_sinks, num_sinks, scratch);
  if (merge == nullptr) {
    begin_with_sinks(work, scratch);
  } else {
    store_partials(work, merge->split_end, scratch);
  }
}

template <class Element>
void attend_item(const AttentionCall& call, AttentionSchedule& schedule, const AttentionItem& item, Scratch& scratch) {
  Work work{call, schedule, item, schedule.rows() + item.first_row, {}, {}};
  for (int i = 0; i < item.num_rows; ++i) {
    work.visible[i] = visible_of(call, work.rows[i].request, work.rows[i].row);
    work.sinks[i] = sinks_of(call, work.rows[i].request, work.rows[i].row);
  }
  if (work.has_sinks(item.num_rows - 1)) attend_sinks<Element>(work, scratch);
  pack_queries(work, call.q, call.q_stride, scratch.q);
  work.is_sparse = call.sparse_tiles > 0 && select_tiles(work, scratch.selection);
  for (int split = item.split_begin; split < item.split_end; ++split) {
    fold_split<Element>(work, split, scratch);
    if (work.is_whole()) {
      merge_split(work, split, scratch);
    } else {
      store_partials(work, split, scratch);
    }
  }
  const int dims = padded_head_dim(call.shape.head_dim);
  for (int i = 0; i < item.num_rows; ++i) {
    if (work.is_whole()) {
      write_output(call, item.kv_head, work.rows[i].request, work.rows[i].row, scratch.total.sums + int64_t(i) * dims,
                   scratch.total.weights[i * 8]);
    } else if (i == 0 || work.merge_of(i) != work.merge_of(i - 1)) {  // once per request
      const int32_t merge = work.merge_of(i);
      if (schedule.finish(merge)) merge_partials(work, schedule.merge(merge));
    }
  }
}

// Computes one item of the schedule.
inline void attend(const AttentionCall& call, AttentionSchedule& schedule, const AttentionItem& item,
                   float* scratch_floats) {
  Scratch scratch = carve_scratch(scratch_floats, call.shape.head_dim);
  switch (call.layout.type) {
    case KvType::f32:
      return attend_item<ElementF32>(call, schedule, item, scratch);
    case KvType::f16:
      return attend_item<ElementF16>(call, schedule, item, scratch);
    case KvType::bf16:
      return attend_item<ElementBf16>(call, schedule, item, scratch);
    case KvType::int8:
      return attend_item<ElementInt8>(call, schedule, item, scratch);
    case KvType::fp8_e4m3:
      return attend_item<ElementE4m3>(call, schedule, item, scratch);
    case KvType::int4:
      return attend_item<ElementInt4>(call, schedule, item, scratch);
  }
}

}  // namespace octavo::OCTAVO_SIMD
