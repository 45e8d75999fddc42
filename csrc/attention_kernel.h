// The attention kernel, compiled once per instruction set (included by kernels_*.cpp only): items of a schedule, their
// splits, and the merging of splits. What happens to one tile is in attention_tile.h.
#pragma once

#include <cassert>
#include <type_traits>

#include "attention_sparse.h"
#include "attention_tile.h"
#include "attention_work.h"

namespace octavo::OCTAVO_SIMD {

// From this many rows on a tile of 16-bit keys and values is converted once, instead of by each register tile.
constexpr int kConvertFromRows = 13;

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
  const int32_t* table = work.table();
  // Rows of one request ascend; rows of several see the whole split.
  const int last_end = visible[num_rows - 1].end;
  const int begin = greater(first, visible[0].begin / kTileTokens * kTileTokens);
  const int end = lesser(last, last_end);
  const auto tile_at = [&](int position) { return call.tile(table, work.item.kv_head, position); };
  clear_sums(scratch.split, num_rows, padded_head_dim(head_dim));
  for (int position = begin; position < end; position += kTileTokens) {
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
                                     visible},
                                    num_rows);
    } else {
      Ahead ahead;
      if (position + kTileTokens < lesser(last_end, ahead_end)) {
        ahead = ahead_of(tile_at(position + kTileTokens), layout.tile_bytes(), head_dim / Element::kNumbers);
      }
      fold_tile<Element>({scratch.q, keys, values, key_scales, value_scales, head_dim, position, bound, ahead,
                          scratch.split, 0, visible},
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
  if (reads_sparsely(work)) {
    assert(work.is_whole() && "tiles are chosen once");
    return attend_sparsely<Element>(work, scratch);
  }
  if (work.has_sinks(item.num_rows - 1)) attend_sinks<Element>(work, scratch);
  pack_queries(work, call.q, call.q_stride, scratch.q);
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
