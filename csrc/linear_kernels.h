// The kernels behind `linear_run`, one table per instruction set.
//
// Included by files that are compiled for different instruction sets: types and declarations only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"
#include "quant_rows.h"

namespace octavo {

// One thread's part of a product: all rows, a range of the panels of one tensor.
struct PanelJob {
  WeightKind kind;
  const uint8_t* panels;  // of the tensor, not of the range
  int64_t scale_bytes;    // per group, see PanelLayout
  int64_t weight_bytes;
  int64_t panel_bytes;
  int64_t panel_begin;
  int64_t panel_end;
  int64_t num_inputs;
  int64_t num_outputs;  // of the tensor; the last panel is cut short
  const float* bias;    // padded to whole panels, or null
  int num_rows;
  const float* x;  // for float kinds
  int64_t x_stride;
  QuantisedRows quantised;  // for the others
  float* out;               // first row, first output of the tensor
  int64_t out_stride;
  uint8_t* scratch;  // kPanelScratchBytes + accumulators of `kBlockRows` rows, 64-byte aligned
};

using QuantiseRows = void (*)(const float* x, int64_t x_stride, int64_t num_inputs, int row_begin, int row_end,
                              const QuantisedRows& to);
using RunPanels = void (*)(const PanelJob& job);

struct LinearKernels {
  // Quantises rows [row_begin, row_end); `row_begin` starts a tile, `row_end` ends one.
  QuantiseRows quantise_rows;
  RunPanels run_panels;
  bool int8_reads_words;  // products with int8 weights read `QuantisedRows::words`, otherwise `bytes`
  const char* name;
};

extern const LinearKernels kPortableLinearKernels;
extern const LinearKernels kAvx2LinearKernels;
extern const RunPanels kAvx512RunPanels;  // reads bytes; rows are quantised by the AVX2 kernels

// The kernels for an instruction set. With `may_widen`, kernels of a wider one are returned where this machine has it
// and a test, run once, finds that they give the same bits here.
const LinearKernels& choose_linear_kernels(Isa isa, bool may_widen);

// Rows that pass over an unpacked panel before the next panel is unpacked: enough to make unpacking cheap, few enough
// to keep their activations in the second-level cache.
constexpr int kBlockRows = 192;

// An unpacked piece of a panel has to share the first-level cache with activations and accumulators.
constexpr int kChunkGroups = 24;    // groups of a piece with integer weights, a multiple of a super-block's 8
constexpr int kPackedInputs = 256;  // inputs of a piece that is read packed: one block
constexpr size_t kUnpackedBytes = static_cast<size_t>(kChunkGroups) * 1024;  // int8 widened to int16 is the largest
constexpr size_t kUnpackedScaleBytes = static_cast<size_t>(kChunkGroups) * 2 * 64;
constexpr size_t kPanelScratchBytes = kUnpackedBytes + kUnpackedScaleBytes;

}  // namespace octavo
