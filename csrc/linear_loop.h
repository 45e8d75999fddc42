// The loops around the register tiles, written once for every instruction set and weight kind.
//
//   for a block of rows                       (activations stay in the second-level cache)
//     for each panel of 16 outputs
//       for each piece of the inputs          (unpacked weights stay in the first-level cache)
//         for each tile of rows               accumulators += piece of x * piece of weights
//           out = accumulators + bias     after the last piece
//
// A sum over the inputs always runs in ascending order into one accumulator, whatever the block, piece or tile.
//
// A kernel K supplies
//   kMaxTileRows             rows of its largest tile
//   kPackedRows              with at most this many rows, tiles read the packed weights and nothing is unpacked
//   kPieceInputs             inputs of a piece that is unpacked
//   K(job)                   remembers the job
//   load(panel, begin, end, unpack)    points it at inputs [begin, end) of a panel
//   look_ahead(index, count)           the next tile is one of `count` over this piece: a hint for prefetching
//   tile<R, kUnpacked>(row, sums)      adds R rows x 16 outputs of that piece to `sums` [R][16]
#pragma once

#include "linear_kernels.h"
#include "simd.h"

// Before a loop over the rows of a tile: its arrays live in registers only when it is unrolled.
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("unroll")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

namespace octavo::OCTAVO_SIMD {

// Fetches the packed weights of the next piece while the tiles of a piece are computed.
class LookAhead {
 public:
  // `next` is where the next piece lies; `num_groups` turns of a tile's loop (groups, or pairs of inputs) fetch.
  void start(const uint8_t* next, int num_bytes, int num_groups) {
    next_ = next;
    num_lines_ = (num_bytes + 63) / 64;
    num_groups_ = num_groups;
  }

  // Spreads the lines evenly over the groups of `num_tiles` tiles, of which number `tile` comes next.
  void set_tile(int tile, int num_tiles) {
    lines_per_group_ = (num_lines_ + num_tiles * num_groups_ - 1) / (num_tiles * num_groups_);
    const int first = tile * num_groups_ * lines_per_group_;
    if (first >= num_lines_) lines_per_group_ = 0;
    first_ = next_ + 64 * static_cast<int64_t>(first);
  }

  __attribute__((always_inline)) void fetch(int group) const {
    const uint8_t* line = first_ + 64 * static_cast<int64_t>(group * lines_per_group_);
    for (int i = 0; i < lines_per_group_; ++i) __builtin_prefetch(line + 64 * i);
  }

 private:
  const uint8_t* next_ = nullptr;
  const uint8_t* first_ = nullptr;
  int num_lines_ = 0;
  int num_groups_ = 1;
  int lines_per_group_ = 0;
};

template <class Kernel, int kRows>
void run_tile(const Kernel& kernel, int num_tile_rows, bool unpacked, int row, float* sums) {
  if constexpr (kRows > 1) {
    if (num_tile_rows < kRows) return run_tile<Kernel, kRows - 1>(kernel, num_tile_rows, unpacked, row, sums);
  }
  if (unpacked) {
    kernel.template tile<kRows, true>(row, sums);
  } else {
    kernel.template tile<kRows, false>(row, sums);
  }
}

// Writes 16 sums (fewer in the last panel) of each row.
OCTAVO_INLINE void store_panel(const PanelJob& job, int64_t panel, int row_begin, int num_rows, const float* sums) {
  const int64_t first = panel * 16;
  const float* bias = job.bias == nullptr ? nullptr : job.bias + first;
  const int num_lanes = static_cast<int>(job.num_outputs - first < 16 ? job.num_outputs - first : 16);
  for (int r = 0; r < num_rows; ++r, sums += 16) {
    float* out = job.out + (row_begin + r) * job.out_stride + first;
    F8 low = load(sums);
    F8 high = load(sums + 8);
    if (bias != nullptr) {
      low += load(bias);
      high += load(bias + 8);
    }
    if (num_lanes == 16) {
      store(out, low);
      store(out + 8, high);
    } else {
      for (int lane = 0; lane < num_lanes; ++lane) out[lane] = lane < 8 ? low[lane] : high[lane - 8];
    }
  }
}

// Fetches the lines that `store_panel` will write after the tile. Rows are far apart, each a page of its own; and often
// all fall into one set of the first-level cache, which holds the lines of a tile but not those of a block.
OCTAVO_INLINE void expect_output(const PanelJob& job, int64_t panel, int row_begin, int num_rows) {
  const float* out = job.out + row_begin * job.out_stride + panel * 16;
  for (int r = 0; r < num_rows; ++r, out += job.out_stride) __builtin_prefetch(out, 1);
}

OCTAVO_INLINE int min_of(int a, int b) { return a < b ? a : b; }

template <class Kernel>
void run_panels_of(const PanelJob& job) {
  Kernel kernel(job);
  constexpr int kRowsOfTile = Kernel::kMaxTileRows;
  constexpr int kRowsOfBlock = kBlockRows / kRowsOfTile * kRowsOfTile;
  float* const sums = reinterpret_cast<float*>(job.scratch + kPanelScratchBytes);
  for (int row_begin = 0; row_begin < job.num_rows; row_begin += kRowsOfBlock) {
    const int num_rows = min_of(job.num_rows - row_begin, kRowsOfBlock);
    const bool unpack = num_rows > Kernel::kPackedRows;
    const int64_t piece = unpack ? Kernel::kPieceInputs : kPackedInputs;
    for (int64_t panel = job.panel_begin; panel < job.panel_end; ++panel) {
      for (int i = 0; i < num_rows * 16; i += 8) store(sums + i, splat(0.0f));
      const uint8_t* packed = job.panels + panel * job.panel_bytes;
      for (int64_t begin = 0; begin < job.num_inputs; begin += piece) {
        const bool is_last = job.num_inputs - begin <= piece;
        kernel.load(packed, begin, is_last ? job.num_inputs : begin + piece, unpack);
        for (int row = 0; row < num_rows; row += kRowsOfTile) {
          const int tile_rows = min_of(num_rows - row, kRowsOfTile);
          kernel.look_ahead(row / kRowsOfTile, (num_rows + kRowsOfTile - 1) / kRowsOfTile);
          if (is_last) expect_output(job, panel, row_begin + row, tile_rows);
          run_tile<Kernel, kRowsOfTile>(kernel, tile_rows, unpack, row_begin + row, sums + row * 16);
          if (is_last) store_panel(job, panel, row_begin + row, tile_rows, sums + row * 16);
        }
      }
    }
  }
}

}  // namespace octavo::OCTAVO_SIMD
