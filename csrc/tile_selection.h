// Which tiles a row reads where it reads sparsely; compiled once per instruction set.
//
// Each tile of 16 tokens has bounds, the least and the greatest of its keys in each dimension. The most that q.k can be
// for a key between them is sum_d min(q_d, 0) * least_d + max(q_d, 0) * greatest_d. A row reads the first tile, its
// own, and those before it with the highest bounds, the lower tile where two are equal. The bound of a tile is one
// chain of mul_adds per lane, whatever other rows and tiles are at hand.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "attention.h"
#include "attention_tile.h"

namespace octavo::OCTAVO_SIMD {

#if defined(__AVX512F__)
constexpr int kTilesAtOnce = 8;
#else
constexpr int kTilesAtOnce = 4;  // in two vectors each
#endif
static_assert(kBoundedTiles % kTilesAtOnce == 0);

// How many tiles ahead bounds are fetched: a few hundred cycles of work.
constexpr int kTilesAhead = 16;

constexpr int32_t kNoTile = std::numeric_limits<int32_t>::min();

// Which tiles each row of an item reads.
struct Selection {
  float* queries;   // [rows][2 * padded_bounds]: those of the even bounds, then those of the odd ones
  float* bounds;    // [kBoundedTiles][2 * padded_bounds], in the same order
  int32_t* ranks;   // [rows][num_words * 32]: bounds in an order of whole numbers; kNoTile for what is not asked
  uint32_t* words;  // [rows][num_words]: bit i of word j for tile 32 * j + i
  int num_words;
  int32_t* tiles;  // those of one row after the other, each ascending

  // Writes the tiles of a row behind the `count` that are there; returns how many there are then.
  int list_tiles(int row, int count) const {
    for (int word = 0; word < num_words; ++word) {
      for (uint32_t bits = words[row * num_words + word]; bits != 0; bits &= bits - 1) {
        tiles[count++] = word * 32 + std::countr_zero(bits);
      }
    }
    return count;
  }
};

// Rounds to bf16, up or down.
OCTAVO_INLINE uint16_t outward_bf16(float value, bool is_up) {
  const uint32_t bits = bits_of(value);
  const bool is_negative = bits >> 31 != 0;
  // Cutting bits off goes toward zero; away from it is one step on.
  const bool is_away = (bits & 0xffff) != 0 && is_negative != is_up && (bits & 0x7f800000) != 0x7f800000;
  return static_cast<uint16_t>((bits >> 16) + (is_away ? 1 : 0));
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

// Where the bounds of tiles lie, and for whom they are read.
struct SelectionCall {
  const AttentionCall& call;
  int kv_head;
  const int32_t* table;  // of the request
  int num_rows;
  const Visible* visible;  // [num_rows]

  int own_tile(int row) const { return (visible[row].end - 1) / kTileTokens; }
  const uint16_t* bounds(int tile) const {
    const std::byte* keys = call.tile(table, kv_head, tile * kTileTokens);
    return reinterpret_cast<const uint16_t*>(keys + call.layout.bounds_after_keys());
  }
};

// Splits a query as bounds are split: its negative parts meet the least keys, its positive ones the greatest.
inline void pack_bound_query(const float* q, int head_dim, float* packed) {
  const int half = padded_bounds(head_dim);
  for (int i = 0; i < half; ++i) packed[i] = packed[half + i] = 0.0f;
  for (int i = 0; i < 2 * head_dim; ++i) {
    const float value = q[i % head_dim];
    // NaN stays one: all its bounds are infinite, and the first tiles are read.
    const bool is_wanted = i < head_dim ? !(value > 0.0f) : !(value < 0.0f);
    packed[i % 2 * half + i / 2] = is_wanted ? value : 0.0f;
  }
}

// Reads the bounds of a tile as floats: first those at even places, then those at odd ones.
inline void unpack_bounds(const uint16_t* from, int head_dim, float* to) {
  const int half = padded_bounds(head_dim);
  V16 even, odd;
  int i = 0;
  for (; i + 16 <= head_dim; i += 16) {
    load16_bf16_pairs(from + 2 * i, &even, &odd);
    store16(to + i, even);
    store16(to + half + i, odd);
  }
  if (i < half) {
    uint16_t last[32] = {};
    std::memcpy(last, from + 2 * i, size_t(head_dim - i) * 2 * sizeof(uint16_t));
    load16_bf16_pairs(last, &even, &odd);
    store16(to + i, even);
    store16(to + half + i, odd);
  }
}

// Ranks of kTilesAtOnce tiles for one query. A tile with a bound that is no number has the highest rank.
OCTAVO_INLINE void rank_tiles(const float* query, const float* bounds, int width, int32_t* ranks) {
  V16 sums[kTilesAtOnce];
#pragma GCC unroll 8
  for (int t = 0; t < kTilesAtOnce; ++t) sums[t] = splat16(0.0f);
  for (int i = 0; i < width; i += 16) {
    const V16 q = load16(query + i);
#pragma GCC unroll 8
    for (int t = 0; t < kTilesAtOnce; ++t) sums[t] = mul_add(q, load16(bounds + t * width + i), sums[t]);
  }
  F8 halves[8] = {};
#pragma GCC unroll 8
  for (int t = 0; t < kTilesAtOnce; ++t) halves[t] = low_half(sums[t]) + high_half(sums[t]);
  const F8 bound = sums_of(halves) + splat(0.0f);  // no negative zero, which would rank below the other
  const I8 bits = as_ints(select(bound == bound, bound, splat(std::numeric_limits<float>::infinity())));
  const I8 order = bits ^ ((bits >> 31) & 0x7fffffff);
  std::memcpy(ranks, &order, kTilesAtOnce * sizeof(int32_t));
}

// The greatest number that at least `num_chosen` ranks reach; `count` is a multiple of 8.
inline int32_t rank_reached(const int32_t* ranks, int count, int num_chosen) {
  uint32_t reached = uint32_t(kNoTile);
  for (int bit = 31; bit >= 0; --bit) {
    const int32_t tried = int32_t(reached + (uint32_t(1) << bit));
    I8 counts = {};
    for (int i = 0; i < count; i += 8) {
      I8 rank;
      std::memcpy(&rank, ranks + i, sizeof rank);
      counts -= rank >= tried;
    }
    int total = 0;
    for (int i = 0; i < 8; ++i) total += counts[i];
    if (total >= num_chosen) reached = uint32_t(tried);
    if (total == num_chosen) break;
  }
  return int32_t(reached);
}

// Marks the `num_chosen` tiles of the highest ranks in `words`, the lower tile where two are equal.
inline void choose_tiles(const int32_t* ranks, int num_words, int num_chosen, uint32_t* words) {
  const int32_t reached = rank_reached(ranks, num_words * 32, num_chosen);
  const auto bits_where = [&](int word, auto is_met) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; i += 8) {
      I8 rank;
      std::memcpy(&rank, ranks + word * 32 + i, sizeof rank);
      bits |= mask_bits(is_met(rank)) << i;
    }
    return bits;
  };
  int num_left = num_chosen;
  for (int word = 0; word < num_words; ++word) {
    words[word] |= bits_where(word, [reached](I8 rank) { return rank > reached; });
    num_left -= std::popcount(words[word]);
  }
  for (int word = 0; word < num_words && num_left > 0; ++word) {
    uint32_t equal = bits_where(word, [reached](I8 rank) { return rank == reached; });
    for (; equal != 0 && num_left > 0; equal &= equal - 1, --num_left) words[word] |= equal & -equal;
  }
}

// Chooses the tiles that rows of one request read. `query_of(row)` is a row's query.
template <class QueryOf>
void select_tiles(const SelectionCall& ask, const QueryOf& query_of, Selection& selection) {
  const int sparse_tiles = ask.call.sparse_tiles;
  const int head_dim = ask.call.layout.head_dim;
  const int num_rows = ask.num_rows;
  const int num_tiles = ask.own_tile(num_rows - 1) + 1;
  selection.num_words = (num_tiles + 31) / 32;
  const int num_ranks = selection.num_words * 32;
  selection.words = reinterpret_cast<uint32_t*>(selection.ranks + num_rows * num_ranks);
  selection.tiles = reinterpret_cast<int32_t*>(selection.words + num_rows * selection.num_words);
  const int width = 2 * padded_bounds(head_dim);
  for (int i = 0; i < num_rows; ++i) pack_bound_query(query_of(i), head_dim, selection.queries + i * width);
  // Group by group, so that each tile's bounds are fetched and read once for all rows; they lie far from each other.
  // The last row's own tile has none yet.
  const int num_bounded = num_tiles - 1;
  const uint16_t* fetched[kTilesAhead];  // where the next ones are
  const auto fetch = [&](int tile) {
    if (tile >= num_bounded) return;
    const uint16_t* bounds = ask.bounds(tile);
    fetched[tile % kTilesAhead] = bounds;
    const auto* bytes = reinterpret_cast<const std::byte*>(bounds);
    for (size_t line = 0; line < ask.call.layout.bounds_bytes(); line += 64) __builtin_prefetch(bytes + line, 0, 2);
  };
  for (int tile = 0; tile < kTilesAhead; ++tile) fetch(tile);
  for (int first = 0; first < num_bounded; first += kBoundedTiles) {
    const int end = lesser(first + kBoundedTiles, num_bounded);
    for (int tile = first; tile < end; ++tile) {
      const uint16_t* bounds = fetched[tile % kTilesAhead];
      fetch(tile + kTilesAhead);
      unpack_bounds(bounds, head_dim, selection.bounds + (tile - first) * width);
    }
    for (int i = 0; i < num_rows; ++i) {
      for (int t = 0; t < kBoundedTiles; t += kTilesAtOnce) {
        rank_tiles(selection.queries + i * width, selection.bounds + t * width, width,
                   selection.ranks + i * num_ranks + first + t);
      }
    }
  }
  for (int i = 0; i < num_rows; ++i) {
    int32_t* ranks = selection.ranks + i * num_ranks;
    uint32_t* words = selection.words + i * selection.num_words;
    const int own = ask.own_tile(i);
    std::fill_n(words, selection.num_words, uint32_t(0));
    if (own < sparse_tiles) {  // all are read
      for (int tile = 0; tile <= own; ++tile) words[tile / 32] |= uint32_t(1) << (tile % 32);
      continue;
    }
    ranks[0] = kNoTile;
    std::fill(ranks + own, ranks + num_ranks, kNoTile);
    choose_tiles(ranks, selection.num_words, sparse_tiles - 2, words);
    words[0] |= 1;
    words[own / 32] |= uint32_t(1) << (own % 32);
  }
}

}  // namespace octavo::OCTAVO_SIMD
