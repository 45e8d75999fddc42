// The kernels of one instruction set, as a table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "attention_schedule.h"
#include "isa.h"
#include "kv_layout.h"
#include "program.h"

namespace octavo {

// How scores become weights: exp((score - highest) / temperature), 0 where that is below `least`.
struct Temper {
  double highest;
  double temperature;
  double least;
};

constexpr int kRunIds = 512;   // ids between two running sums that are remembered
constexpr int kBlockIds = 64;  // ids per block when the highest scores are looked for
constexpr int kNumMasses = 8;
constexpr double kMassBounds[kNumMasses] = {0x1p-3, 0x1p-6, 0x1p-9, 0x1p-12, 0x1p-15, 0x1p-18, 0x1p-22, 0x1p-27};

// Passes over a row of `count` logits; defined in sample_kernels.h, the same bits in every instruction set.
struct SampleKernels {
  float (*highest_logit)(const float* logits, int count);  // NaN when one is NaN
  int (*first_index)(const float* logits, int count, float value);
  double (*sum_of_exp)(const float* logits, int count, double highest);
  int (*count_before)(const float* logits, int count, double highest, double own, int id);
  void (*widen)(const float* logits, int count, double* scores);
  double (*weigh_doubles)(const double* scores, int count, const Temper& temper, double* weights, double* runs);
  double (*weigh_floats)(const float* logits, int count, const Temper& temper, double* weights, double* runs);
  double (*lane_sum)(const double* values, int count);
  void (*masses_above)(const double* weights, int count, double* masses);
  void (*block_tops_doubles)(const double* scores, int count, double* tops);
  void (*block_tops_floats)(const float* logits, int count, double highest, double* tops);
  int (*gather_doubles)(const double* scores, int count, double least, int32_t* ids);
  int (*gather_floats)(const float* logits, int count, double highest, double least, int32_t* ids);
};

// Computes one item of a schedule. `scratch` has attention_scratch_floats(), 64-byte aligned.
using AttendFunction = void (*)(const AttentionCall& call, AttentionSchedule& schedule, const AttentionItem& item,
                                float* scratch);

struct Kernels {
  // out = x / sqrt(mean(x^2) + eps) * weight over `width` floats; `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, float* out, int width, float eps);
  // out = (x - mean) / sqrt(variance + eps) * weight + bias
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float* out, int width, float eps);
  // x += y
  void (*add)(float* x, const float* y, int width);
  // out = f(x[:width]), times x[width:2 * width] with a gate
  void (*activate)(const float* x, float* out, int width, Activation activation, bool has_gate);
  // x = cap * tanh(x / cap)
  void (*soft_cap)(float* x, int width, float cap);
  // Rotates dimension pairs (i, i + half) of one head in place.
  void (*rotate)(float* head, const float* cosines, const float* sines, int half);
  // Hadamard transforms in place, as in hadamard.h.
  void (*hadamard)(float* head, int head_dim);
  void (*hadamard_inverse)(float* head, int head_dim);
  // Rounds or quantises one head's key and value and writes them to their place in a tile.
  void (*store_kv)(const KvLayout& layout, std::byte* tile, int place, const float* key, const float* value);
  // Writes the bounds of a tile whose 16 keys are there.
  void (*bound_tile)(const KvLayout& layout, std::byte* tile);
  AttendFunction attend;
  SampleKernels sample;
};

const Kernels& kernels_portable();
const Kernels& kernels_avx2();  // exists only in builds for x86-64

inline const Kernels& kernels_of([[maybe_unused]] Isa isa) {
#if OCTAVO_HAVE_AVX2
  if (isa == Isa::avx2) return kernels_avx2();
#endif
  return kernels_portable();
}

extern const AttendFunction kAttendAvx512;  // exists only in builds that know AVX-512

// The attention of an instruction set; `may_widen` allows a wider one that was seen to give the same bits here.
AttendFunction choose_attend(Isa isa, bool may_widen);

}  // namespace octavo
