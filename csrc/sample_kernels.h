// Passes over a row of logits, compiled once per instruction set (included by kernels_*.cpp only).
//
// All of it is float64 with separate multiplications and additions, so every instruction set gives the same bits as the
// reference (octavo/runtime/portable_math.py).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"
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

// Where the scores of a row come from. Both give float64; the second is for logits that nothing was added to.
struct Doubles {
  const double* scores;
  OCTAVO_INLINE D4 load4(const Doubles& from, int i) { return load_doubles(from.scores + i); }
  OCTAVO_INLINE double load1(const Doubles& from, int i) { return from.scores[i]; }
};
struct Floats {
  const float* logits;
  double highest;  // subtracted
  OCTAVO_INLINE D4 load4(const Floats& from, int i) {
    return widen_floats(from.logits + i) - splat_double(from.highest);
  }
  OCTAVO_INLINE double load1(const Floats& from, int i) { return double(from.logits[i]) - from.highest; }
};

OCTAVO_INLINE D4 weight_of(D4 x, const Temper& temper) {
  D4 scaled = x - splat_double(temper.highest);
  // Dividing by 1 changes nothing and takes long.
  if (temper.temperature != 1.0) scaled = scaled / splat_double(temper.temperature);
  const D4 weight = exp_of_negative(scaled);
  return weight < splat_double(temper.least) ? splat_double(0.0) : weight;
}

// Weights of a row; returns their running sum. `runs` receives the sum before each run of ids. The sum is one chain of
// additions, which the exponentials of the next ids overlap with.
template <class Source>
OCTAVO_INLINE double weigh_from(const Source& from, int count, const Temper& temper, double* weights, double* runs) {
  double running = 0.0;
  for (int begin = 0; begin < count; begin += kRunIds) {
    runs[begin / kRunIds] = running;
    const int end = begin + kRunIds < count ? begin + kRunIds : count;
    int i = begin;
    for (; i + 4 <= end; i += 4) {
      const D4 weight = weight_of(Source::load4(from, i), temper);
      store_doubles(weights + i, weight);
      running = (((running + weight[0]) + weight[1]) + weight[2]) + weight[3];
    }
    for (; i < end; ++i) {
      weights[i] = weight_of(splat_double(Source::load1(from, i)), temper)[0];
      running += weights[i];
    }
  }
  return running;
}

inline double weigh_doubles(const double* scores, int count, const Temper& temper, double* weights, double* runs) {
  return weigh_from(Doubles{scores}, count, temper, weights, runs);
}

inline double weigh_floats(const float* logits, int count, const Temper& temper, double* weights, double* runs) {
  return weigh_from(Floats{logits, 0.0}, count, temper, weights, runs);
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

OCTAVO_INLINE int bits_of_mask(L4 mask) {
#if OCTAVO_SIMD_AVX2
  return _mm256_movemask_pd((__m256d)mask);
#else
  return int((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
#endif
}

// Highest score of each block of ids. Scores are not NaN.
template <class Source>
OCTAVO_INLINE void block_tops_from(const Source& from, int count, double* tops) {
  for (int begin = 0; begin < count; begin += kBlockIds) {
    const int end = begin + kBlockIds < count ? begin + kBlockIds : count;
    D4 top = splat_double(-std::numeric_limits<double>::infinity());
    int i = begin;
    for (; i + 4 <= end; i += 4) {
      const D4 x = Source::load4(from, i);
      top = x > top ? x : top;
    }
    double highest = top[0];
    for (int j = 1; j < 4; ++j) highest = top[j] > highest ? top[j] : highest;
    for (; i < end; ++i) highest = Source::load1(from, i) > highest ? Source::load1(from, i) : highest;
    tops[begin / kBlockIds] = highest;
  }
}

inline void block_tops_doubles(const double* scores, int count, double* tops) {
  block_tops_from(Doubles{scores}, count, tops);
}

inline void block_tops_floats(const float* logits, int count, double highest, double* tops) {
  block_tops_from(Floats{logits, highest}, count, tops);
}

// Ids whose score is at least `least`, ascending; returns how many.
template <class Source>
OCTAVO_INLINE int gather_from(const Source& from, int count, double least, int32_t* ids) {
  int found = 0;
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    int bits = bits_of_mask(Source::load4(from, i) >= splat_double(least));
    for (; bits != 0; bits &= bits - 1) ids[found++] = i + __builtin_ctz(static_cast<unsigned>(bits));
  }
  for (; i < count; ++i) {
    if (Source::load1(from, i) >= least) ids[found++] = i;
  }
  return found;
}

inline int gather_doubles(const double* scores, int count, double least, int32_t* ids) {
  return gather_from(Doubles{scores}, count, least, ids);
}

inline int gather_floats(const float* logits, int count, double highest, double least, int32_t* ids) {
  return gather_from(Floats{logits, highest}, count, least, ids);
}

// How many ids have a higher score (x - highest) than `own`, or the same one and come before `id`.
inline int count_before(const float* logits, int count, double highest, double own, int id) {
  const Floats from{logits, highest};
  int before = 0;
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const D4 x = Floats::load4(from, i);
    before += __builtin_popcount(static_cast<unsigned>(bits_of_mask(x > splat_double(own))));
    if (bits_of_mask(x == splat_double(own)) == 0) continue;
    for (int j = i; j < i + 4 && j < id; ++j) before += Floats::load1(from, j) == own;
  }
  for (; i < count; ++i) before += Floats::load1(from, i) > own || (Floats::load1(from, i) == own && i < id);
  return before;
}

// Sums of the weights that are at least 2^-shift, for each of kNumMasses shifts: near enough to choose by.
inline void masses_above(const double* weights, int count, double* masses) {
  D4 sums[kNumMasses] = {};
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const D4 weight = load_doubles(weights + i);
    for (int m = 0; m < kNumMasses; ++m) {
      sums[m] += weight >= splat_double(kMassBounds[m]) ? weight : splat_double(0.0);
    }
  }
  for (int m = 0; m < kNumMasses; ++m) {
    masses[m] = (sums[m][0] + sums[m][1]) + (sums[m][2] + sums[m][3]);
    for (int j = i; j < count; ++j) masses[m] += weights[j] >= kMassBounds[m] ? weights[j] : 0.0;
  }
}

}  // namespace octavo::OCTAVO_SIMD
