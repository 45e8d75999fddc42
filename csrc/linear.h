// Products of activations with weights that were packed once for register tiles.
//
// Contract: a row of `linear_run` has the same bits whatever `num_rows`, the row's place among them, the strides, and
// the number of threads: every sum over the inputs runs in one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "isa.h"
#include "team.h"

namespace octavo {

// How the numbers of a weight are held. The first three are multiplied with float32 activations; the others with
// activations quantised to int8 per row and group of 32, summed as integers inside a group.
enum class WeightKind : uint8_t {
  f32,
  f16,
  bf16,
  int8,  // groups of 32 with one f16 scale: GGUF Q8_0
  q4_0,  // groups of 32 with one f16 scale
  q4_1,  // groups of 32 with f16 scale and minimum
  q4_k,  // GGUF super-blocks of 256
  q6_k,
};

// Weights `[num_outputs, num_inputs]` of one Linear op (one or several tensors side by side), packed; owns its memory.
struct PackedLinear;

// One tensor of a Linear: rows as they lie in a file, row-major, contiguous. `bias` is `num_outputs` floats or null.
struct LinearPart {
  WeightKind kind;
  const void* rows;
  int64_t num_outputs;
  const float* bias;
};

// Packs parts (possibly of different kinds) side by side. Reads `rows` and `bias` only during the call.
// Throws std::invalid_argument when `num_inputs` does not suit a kind. `may_widen` allows kernels of an instruction set
// wider than `isa` that give the same bits, where there are any; tests compare both.
std::shared_ptr<const PackedLinear> pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, Isa isa,
                                                bool may_widen = true);

int64_t linear_num_outputs(const PackedLinear& linear);
int64_t linear_num_inputs(const PackedLinear& linear);
// Instruction set of the kernels that were chosen: "portable", "avx2", "avx512".
const char* linear_kernels_name(const PackedLinear& linear);
// Bytes of packed weights and biases that stay resident.
size_t linear_resident_bytes(const PackedLinear& linear);

// Scratch for calls with up to `max_rows` rows, in bytes: one area shared by the team (e.g. the quantised activations
// of all rows) and one area per thread. Both are handed over 64-byte aligned; their content does not survive a call.
size_t linear_shared_scratch_bytes(const PackedLinear& linear, int max_rows);
size_t linear_thread_scratch_bytes(const PackedLinear& linear, int max_rows);

// out[r, :] = weights @ x[r, :] + bias for `num_rows` rows; strides in floats; `out` does not overlap `x`.
//
// Called by every thread of a running team that comes, with the same arguments but `thread` and `thread_scratch`; the
// work is in chunks (Team::for_chunks), so `x` is complete before and `out` after. Rows may lie at any address aligned
// to 4 bytes (buffers of the executor are 64-byte aligned with strides that are multiples of 16 floats). May be called
// with num_rows == 0.
void linear_run(const PackedLinear& linear, const float* x, int64_t x_stride, int num_rows, float* out,
                int64_t out_stride, void* shared_scratch, void* thread_scratch, Team& team, int thread);

// out[r, :] = weights[token_ids[r], :] * scale: the embedding look-up from the copy that a tied head multiplies with.
// Computed by the calling thread alone. Ids are in range.
void embed_rows(const PackedLinear& weights, const int32_t* token_ids, int num_rows, float scale, float* out,
                int64_t out_stride);

}  // namespace octavo
