// Activations quantised for products with integer weights.
//
// Each row is cut into groups of 32 inputs. A group has scale s = max|x| / 127 (float32) and int8 numbers
// q = round(x / s), ties to even, computed as x * (127 / max|x|). Groups whose max|x| is below 2^-120 count as zero; a
// group that holds a NaN or an infinity has s = NaN, so that its row, and no other row, becomes NaN.
//
// Rows are stored in tiles of four (the last one shorter), interleaved as a register tile reads them. With R rows in
// the tile that starts at row r0, for `num_inputs` inputs:
//
//   bytes    at r0 * num_inputs:      [group][8 quads of inputs][R][4] int8
//   words    at r0 * num_inputs:      [group][16 pairs of inputs][R][2] int16, the same numbers
//   scales   at r0 * num_groups * 2:  [group]([R] scale, [R] sum of q as a float: a whole number, exact)
//   offsets  at r0 * num_groups * 2:  [group][R][2 sub-blocks of 16] pairs of int16: -32 * (sum over the quads of the
//            sub-block of inputs 0, 1), -32 * (... of inputs 2, 3)
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kGroupInputs = 32;
constexpr int kTileRows = 4;

struct QuantisedRows {
  int8_t* bytes;   // null: not wanted
  int16_t* words;  // null: not wanted
  float* scales;
  int32_t* offsets;  // null: not wanted
};

// Bits of magnitudes, which are ordered like the floats they are.
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kNanBits = 0x7fc00000;
constexpr int32_t kTinyBits = (127 - 120) << 23;  // 2^-120; below it, 127 / max|x| would overflow

}  // namespace octavo
