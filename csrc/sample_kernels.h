// Passes over a row of logits, compiled once per instruction set (included by kernels_*.cpp only).
//
// All of it is float64 with separate multiplications and additions, so every instruction set gives the same bits as the
// reference (octavo/runtime/portable_math.py).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace octavo::OCTAVO_SIMD {

typedef double D4 __attribute__((vector_size(32)));
typedef int64_t L4 __attribute__((vector_size(32)));

constexpr int kSumLanes = 16;

OCTAVO_INLINE D4 splat_double(double x) { return D4{x, x, x, x}; }

OCTAVO_INLINE D4 load_doubles(const double* p) {
  D4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE void store_doubles(double* p, D4 v) { std::memcpy(p, &v, sizeof v); }

OCTAVO_INLINE D4 widen_floats(const float* p) {
#if OCTAVO_SIMD_AVX2
  return (D4)_mm256_cvtps_pd(_mm_loadu_ps(p));
#else
  return D4{p[0], p[1], p[2], p[3]};
#endif
}

// 1/13! ... 1/0!
constexpr double kTaylor[] = {1.0 / 6227020800.0,
                              1.0 / 479001600.0,
                              1.0 / 39916800.0,
                              1.0 / 3628800.0,
                              1.0 / 362880.0,
                              1.0 / 40320.0,
                              1.0 / 5040.0,
                              1.0 / 720.0,
                              1.0 / 120.0,
                              1.0 / 24.0,
                              1.0 / 6.0,
                              1.0 / 2.0,
                              1.0,
                              1.0};

// e^x for x <= 0; 0 below -708.
OCTAVO_INLINE D4 exp_of_negative(D4 x) {
  constexpr double kLowest = -708.0;
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number, ties to even
  const D4 clipped = x > splat_double(kLowest) ? x : splat_double(kLowest);
  const D4 shifted = clipped * splat_double(1.4426950408889634) + splat_double(kShift);
  const D4 k = shifted - splat_double(kShift);
  const D4 r = (clipped - k * splat_double(0x1.62e42feep-1)) - k * splat_double(0x1.a39ef35793c76p-33);
  D4 p = splat_double(kTaylor[0]);
  for (int i = 1; i < 14; ++i) p = p * r + splat_double(kTaylor[i]);
  const L4 power = ((L4)shifted + 1023) << 52;  // the low bits of `shifted` hold k
  p = p * (D4)power;
  return x < splat_double(kLowest) ? splat_double(0.0) : p;
}

// Sum in 16 lanes, then lane after lane; the order of portable_math.lane_sum.
struct LaneSum {
  D4 lanes[4] = {};

  double total() const {
    double sum = 0.0;
    for (int i = 0; i < kSumLanes; ++i) sum += lanes[i / 4][i % 4];
    return sum;
  }
};

// The highest of `count` logits; NaN when one is NaN.
inline float highest_logit(const float* logits, int count) {
  F8 highest = splat(-std::numeric_limits<float>::infinity());
  I8 is_nan = {};
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    const F8 v = load(logits + i);
    highest = max(v, highest);
    is_nan |= v != v;
  }
  float result = greatest(highest);
  bool has_nan = any(is_nan);
  for (; i < count; ++i) {
    result = logits[i] > result ? logits[i] : result;
    has_nan |= logits[i] != logits[i];
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

// The first index that holds `value`; there is one.
inline int first_index(const float* logits, int count, float value) {
  int i = 0;
  while (i + 8 <= count && !any(load(logits + i) == splat(value))) i += 8;
  while (i + 1 < count && logits[i] != value) ++i;
  return i;
}

// Sum of exp(x - highest) over a row.
inline double sum_of_exp(const float* logits, int count, double highest) {
  LaneSum sum;
  const D4 top = splat_double(highest);
  int i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (int j = 0; j < 4; ++j) sum.lanes[j] += exp_of_negative(widen_floats(logits + i + 4 * j) - top);
  }
  if (i < count) {
    float rest[kSumLanes] = {};
    for (int j = i; j < count; ++j) rest[j - i] = logits[j];
    double values[kSumLanes];
    for (int j = 0; j < 4; ++j) store_doubles(values + 4 * j, exp_of_negative(widen_floats(rest + 4 * j) - top));
    for (int j = 0; j < count - i; ++j) sum.lanes[j / 4][j % 4] += values[j];
  }
  return sum.total();
}

// weights = exp((x - highest) / temperature), 0 where that is below `least`.
inline void weigh(const double* scores, int count, double highest, double temperature, double least, double* weights) {
  const auto of = [&](D4 x) {
    const D4 weight = exp_of_negative((x - splat_double(highest)) / splat_double(temperature));
    return weight < splat_double(least) ? splat_double(0.0) : weight;
  };
  int i = 0;
  for (; i + 4 <= count; i += 4) store_doubles(weights + i, of(load_doubles(scores + i)));
  if (i < count) {
    double rest[4] = {highest, highest, highest, highest};
    for (int j = i; j < count; ++j) rest[j - i] = scores[j];
    store_doubles(rest, of(load_doubles(rest)));
    for (int j = i; j < count; ++j) weights[j] = rest[j - i];
  }
}

inline double lane_sum(const double* values, int count) {
  LaneSum sum;
  int i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (int j = 0; j < 4; ++j) sum.lanes[j] += load_doubles(values + i + 4 * j);
  }
  for (int j = 0; i + j < count; ++j) sum.lanes[j / 4][j % 4] += values[i + j];
  return sum.total();
}

inline void widen(const float* logits, int count, double* scores) {
  int i = 0;
  for (; i + 4 <= count; i += 4) store_doubles(scores + i, widen_floats(logits + i));
  for (; i < count; ++i) scores[i] = logits[i];
}

}  // namespace octavo::OCTAVO_SIMD
