// How packed weights lie in memory.
//
// The outputs of a tensor are cut into panels of 16 (the last one padded with zeros), so that a register tile finds
// the numbers of its 16 columns side by side. A panel of a float kind is [input][16 outputs]. A panel of any other kind
// is a row of blocks of 256 inputs (the last one shorter where groups are 32), each with its scales first, then its
// groups of 32 inputs. A thread thus reads its panels as one stream, scales included:
//
//           scales of a block, G = 8 groups unless it is short               a group
//   int8    [G][16] f16 scale                                                [input pair 0..15][16 outputs][2] int8
//   q4_0    [G][16] f16 scale                                                nibbles
//   q4_1    [G]([16] f16 scale, [16] f16 minimum)                            nibbles
//   q4_k    [16] f16 d, [16] f16 dmin, [12 bytes of 6-bit scales][16]        nibbles
//   q6_k    [16] f16 d, [16 sub-blocks][16] int8 scale                       nibbles, two-bit fields
//
//   nibbles          [4 rows j][16 outputs][4] bytes: low half input 4j + i of the group, high half input 16 + 4j + i
//   two-bit fields   [2 rows t][16 outputs][4] bytes: bits 2f, 2f + 1 belong to input 16 t + 4 f + i
//
// A panel is as large as its 16 rows in the file: packing moves bytes and drops or adds none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "linear.h"
#include "linear_kernels.h"
#include "quant_rows.h"

namespace octavo {

constexpr int kPanelOutputs = 16;
constexpr int kSuperBlockInputs = 256;

constexpr int kBlockGroups = kSuperBlockInputs / kGroupInputs;

// Bytes that a group of 32 inputs takes in a panel.
struct PanelLayout {
  int64_t scale_bytes;  // its share of the block's scales; 0 for float kinds
  int64_t weight_bytes;
};

bool is_quantised(WeightKind kind);

// Inputs come in whole multiples of this: 1, 32 (groups) or 256 (super-blocks).
int64_t inputs_multiple(WeightKind kind);

// Bytes of one row as it lies in a file.
int64_t file_row_bytes(WeightKind kind, int64_t num_inputs);

PanelLayout panel_layout(WeightKind kind);

// One tensor of a Linear. Its outputs are columns `first_output ...` of the product.
struct PackedPart {
  WeightKind kind;
  int64_t first_output;
  int64_t num_outputs;
  int64_t num_panels;
  PanelLayout layout;
  int64_t panel_bytes;
  std::shared_ptr<uint8_t[]> panels;  // 64-byte aligned
  std::vector<float> bias;            // empty, or num_panels * 16 floats
};

struct PackedLinear {
  const LinearKernels* kernels;
  int64_t num_inputs;
  int64_t num_outputs;
  std::vector<PackedPart> parts;
};

}  // namespace octavo
