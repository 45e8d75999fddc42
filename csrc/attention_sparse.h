// Rows that read only some tiles; compiled once per instruction set. Each row has tiles of its own, so rows are folded
// one by one. The sum of a score is one chain of mul_adds, and a row alone would wait for each link of it: several
// tiles are scored at once.
#pragma once

#include <bit>

#include "attention_tile.h"
#include "attention_work.h"
#include "tile_selection.h"

namespace octavo::OCTAVO_SIMD {

constexpr int kScoredAtOnce = 4;

// The tiles that rows read, one row's after the other's.
template <class Element>
struct TileList {
  const int32_t* tiles;
  int count;  // of all rows: those of the next row are fetched while this one is computed
  const Work& work;

  const std::byte* at(int index) const {
    return work.call.tile(work.table(), work.item.kv_head, tiles[index] * kTileTokens);
  }
  Ahead ahead(int index) const {
    const KvLayout& layout = work.call.layout;
    return index < count ? ahead_of(at(index), layout.bounds_after_keys(), layout.head_dim / Element::kNumbers)
                         : Ahead{};
  }
};

// Scores of one row against `Tiles` tiles from `first` on, while as many later ones are fetched.
template <class Element, int Tiles>
OCTAVO_INLINE void score_tiles(const TileList<Element>& list, int first, const float* q, V16* scores) {
  constexpr int kNumbers = Element::kNumbers;
  const KvLayout& layout = list.work.call.layout;
  const typename Element::Type* keys[Tiles];
  Ahead ahead[kScoredAtOnce];
  V16 sums[Tiles];
#pragma GCC unroll 4
  for (int t = 0; t < Tiles; ++t) {
    keys[t] = reinterpret_cast<const typename Element::Type*>(list.at(first + t));
    sums[t] = splat16(0.0f);
  }
  for (int t = 0; t < kScoredAtOnce; ++t) ahead[t] = list.ahead(first + kScoredAtOnce + t);
  for (int i = 0; i < layout.head_dim / kNumbers; ++i) {
    for (int t = 0; t < kScoredAtOnce; ++t) {
      if (ahead[t].is_wanted()) prefetch(ahead[t], i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < Tiles; ++t) {
      V16 k[kNumbers];
      Element::load_keys(keys[t] + i * kTileTokens, k);
#pragma GCC unroll 2
      for (int j = 0; j < kNumbers; ++j) sums[t] = mul_add(splat16(q[i * kNumbers + j]), k[j], sums[t]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < Tiles; ++t) {
    const std::byte* tile = reinterpret_cast<const std::byte*>(keys[t]);
    const auto* scales = reinterpret_cast<const uint16_t*>(tile + layout.key_scales_after_keys());
    scores[t] = Element::kIsScaled ? sums[t] * load16_bf16(scales) : sums[t];
  }
}

// Scores of one row against `count` tiles, up to kScoredAtOnce.
template <class Element>
void score_some_tiles(const TileList<Element>& list, int first, int count, const float* q, V16* scores) {
  switch (count) {
    case 1:
      return score_tiles<Element, 1>(list, first, q, scores);
    case 2:
      return score_tiles<Element, 2>(list, first, q, scores);
    case 3:
      return score_tiles<Element, 3>(list, first, q, scores);
    default:
      return score_tiles<Element, 4>(list, first, q, scores);
  }
}
static_assert(kScoredAtOnce == 4);

// Folds a scored tile into the sums of row 0, which sees what lies before `end_position`.
template <class Element>
OCTAVO_INLINE void fold_scored_tile(const TileList<Element>& list, int index, V16 score, int end_position,
                                    const RowSums& rows) {
  const AttentionCall& call = list.work.call;
  const KvLayout& layout = call.layout;
  const int dims = padded_head_dim(layout.head_dim);
  const std::byte* tile = list.at(index);
  const auto* values = reinterpret_cast<const typename Element::Type*>(tile + layout.values_after_keys());
  const auto* scales = reinterpret_cast<const uint16_t*>(tile + layout.value_scales_after_keys());
  const int end = lesser(end_position - list.tiles[index] * kTileTokens, kTileTokens);
  alignas(64) float p[kTileTokens];
  if (call.softcap > 0.0f) bound_scores<1>(&score, call.softcap * kLog2E);
  // What lies behind the row is not read: it may be NaN.
  const V16 visible = select_lanes(0, end, score, splat16(-std::numeric_limits<float>::infinity()));
  fold_scores<Element>(visible, scales, rows, 0, dims, p);
  add_values<Element, 1>(p, values, layout.head_dim, rows.sums, dims, 0, end);
}

// Moves the sums of a split to the total of the splits before it.
OCTAVO_INLINE void merge_split_of_row(const Scratch& scratch, bool is_first, int dims) {
  const RowSums& part = scratch.split;
  const RowSums& total = scratch.total;
  const float weight = sum(load(part.weights));
  if (is_first) {
    copy_sums(part.sums, dims, total.sums);
    total.weights[0] = weight;
    total.maxima[0] = part.maxima[0];
  } else {
    merge_row(total.sums, total.weights[0], total.maxima[0], part.sums, weight, part.maxima[0], dims);
  }
}

// Computes one row of an item, which reads tiles [begin, end) of the list. Tiles are folded split by split, as if all
// were read.
template <class Element>
void attend_row_sparsely(const Work& work, int row, const TileList<Element>& list, int begin, int end,
                         const Scratch& scratch) {
  const AttentionCall& call = work.call;
  const int head_dim = call.shape.head_dim;
  const int dims = padded_head_dim(head_dim);
  const AttentionRow& place = work.rows[row];
  const float* query = call.q + element_of(call, work.item.kv_head, place.request, place.row, call.q_stride);
  const float factor = call.scale * kLog2E;
  for (int d = 0; d < head_dim; ++d) scratch.q[d] = query[d] * factor;
  int split = 0;  // every row reads the first tile
  clear_sums(scratch.split, 1, dims);
  for (int first = begin; first < end; first += kScoredAtOnce) {
    const int count = lesser(kScoredAtOnce, end - first);
    V16 scores[kScoredAtOnce];
    score_some_tiles(list, first, count, scratch.q, scores);
    for (int i = 0; i < count; ++i) {
      if (list.tiles[first + i] / kTilesPerSplit != split) {
        merge_split_of_row(scratch, split == 0, dims);
        clear_sums(scratch.split, 1, dims);
        split = list.tiles[first + i] / kTilesPerSplit;
      }
      fold_scored_tile(list, first + i, scores[i], work.visible[row].end, scratch.split);
    }
  }
  merge_split_of_row(scratch, split == 0, dims);
  write_output(call, work.item.kv_head, place.request, place.row, scratch.total.sums, scratch.total.weights[0]);
}

// Whether rows of an item leave tiles out.
inline bool reads_sparsely(const Work& work) {
  const int num_tiles = (work.visible[work.item.num_rows - 1].end + kTileTokens - 1) / kTileTokens;
  return work.call.sparse_tiles > 0 && num_tiles > work.call.sparse_tiles;
}

template <class Element>
void attend_sparsely(const Work& work, Scratch& scratch) {
  const AttentionCall& call = work.call;
  const auto query_of = [&](int i) {
    return call.q + element_of(call, work.item.kv_head, work.rows[i].request, work.rows[i].row, call.q_stride);
  };
  select_tiles({call, work.item.kv_head, work.table(), work.item.num_rows, work.visible}, query_of, scratch.selection);
  int ends[kMaxRowsPerBlock];
  int count = 0;
  for (int row = 0; row < work.item.num_rows; ++row) ends[row] = count = scratch.selection.list_tiles(row, count);
  const TileList<Element> list{scratch.selection.tiles, count, work};
  for (int row = 0; row < work.item.num_rows; ++row) {
    attend_row_sparsely(work, row, list, row == 0 ? 0 : ends[row - 1], ends[row], scratch);
  }
}

}  // namespace octavo::OCTAVO_SIMD
