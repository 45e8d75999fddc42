// How packed weights lie in memory.
//
// The outputs of a tensor are cut into panels of 16 (the last one padded with zeros), so that a register tile finds
// the numbers of its 16 columns side by side and a thread reads its panels as one stream. One panel, in order:
//
//   f32 f16 bf16   [input][16 outputs]
//   int8           [group][16] f16 scale  |  [group][input pair 0..15][16 outputs][2] int8
//   q4_0           [group][16] f16 scale  |  [group] nibbles
//   q4_1           [group]([16] f16 scale, [16] f16 minimum)  |  [group] nibbles
//   q4_k           [super-block]([16] f16 d, [16] f16 dmin, [12][16] bytes of 6-bit scales)  |  [group] nibbles
//   q6_k           [super-block]([16] f16 d, [16 sub-blocks][16] int8 scales)  |  [group](nibbles, two-bit fields)
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

#include "isa.h"
#include "linear.h"
#include "quant_rows.h"

namespace octavo {

constexpr int kPanelOutputs = 16;
constexpr int kSuperBlockInputs = 256;

// Bytes before the weights of a panel (scales), and bytes of weights per group of 32 inputs. Zero scales for f32 kinds.
struct PanelLayout {
  int64_t scale_bytes;
  int64_t group_bytes;
  int64_t panel_bytes;
};

bool is_quantised(WeightKind kind);

// Inputs come in whole multiples of this: 1, 32 (groups) or 256 (super-blocks).
int64_t inputs_multiple(WeightKind kind);

// Bytes of one row as it lies in a file.
int64_t file_row_bytes(WeightKind kind, int64_t num_inputs);

PanelLayout panel_layout(WeightKind kind, int64_t num_inputs);

struct AlignedDelete {
  void operator()(uint8_t* bytes) const;
};

// One tensor of a Linear. Its outputs are columns `first_output ...` of the product.
struct PackedPart {
  WeightKind kind;
  int64_t first_output;
  int64_t num_outputs;
  int64_t num_panels;
  PanelLayout layout;
  std::unique_ptr<uint8_t[], AlignedDelete> panels;  // 64-byte aligned
  std::vector<float> bias;                           // empty, or num_panels * 16 floats
};

struct PackedLinear {
  Isa isa;
  int64_t num_inputs;
  int64_t num_outputs;
  std::vector<PackedPart> parts;
};

}  // namespace octavo
