// Eight floats at a time, for kernels whose source is compiled once per instruction set.
//
// A kernel file includes this header and lives in `namespace octavo::OCTAVO_SIMD`. The name differs between the AVX2
// translation units and the others, so that the linker never takes code for one instruction set from the other.
// The operators of F8 (+ - * < ...) are the compiler's own vector extension; what it lacks is here.
//
// `mul_add` is one rounding with AVX2 and two in portable code (a fused operation without hardware is a library call):
// each build is exact to itself, the two may differ in the last bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes its own intrinsics' way of saying "any value" for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#if defined(__AVX512F__)
#define OCTAVO_SIMD simd_avx512
#else
#define OCTAVO_SIMD simd_avx2
#endif
#define OCTAVO_SIMD_AVX2 1
#else
#define OCTAVO_SIMD simd_portable
#define OCTAVO_SIMD_AVX2 0
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_SIMD {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

OCTAVO_INLINE F8 load(const float* p) {
  F8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE void store(float* p, F8 v) { std::memcpy(p, &v, sizeof v); }

OCTAVO_INLINE F8 splat(float x) {
#if OCTAVO_SIMD_AVX2
  return (F8)_mm256_set1_ps(x);
#else
  return F8{x, x, x, x, x, x, x, x};
#endif
}

OCTAVO_INLINE F8 mul_add(F8 a, F8 b, F8 c) {
#if OCTAVO_SIMD_AVX2
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE I8 as_ints(F8 v) { return (I8)v; }
OCTAVO_INLINE F8 as_floats(I8 v) { return (F8)v; }

// `a` where the mask is set, else `b`; masks come from comparisons.
OCTAVO_INLINE F8 select(I8 mask, F8 a, F8 b) { return mask ? a : b; }

// Of two NaN-free values the greater; with a NaN, `b`.
OCTAVO_INLINE F8 max(F8 a, F8 b) {
#if OCTAVO_SIMD_AVX2
  return (F8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

OCTAVO_INLINE F8 min(F8 a, F8 b) {
#if OCTAVO_SIMD_AVX2
  return (F8)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}

OCTAVO_INLINE bool any(I8 mask) {
#if OCTAVO_SIMD_AVX2
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= mask[i];
  return bits != 0;
#endif
}

// Bit i: whether the mask is set in lane i.
OCTAVO_INLINE uint32_t mask_bits(I8 mask) {
#if OCTAVO_SIMD_AVX2
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}

// Lane i: the sum of the lanes of vector i, in one fixed order.
OCTAVO_INLINE F8 sums_of(const F8 (&v)[8]) {
#if OCTAVO_SIMD_AVX2
  const auto pairs = [&v](int i) { return _mm256_hadd_ps((__m256)v[i], (__m256)v[i + 1]); };
  const __m256 low = _mm256_hadd_ps(pairs(0), pairs(2));
  const __m256 high = _mm256_hadd_ps(pairs(4), pairs(6));
  return (F8)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#else
  F8 sums;
  for (int i = 0; i < 8; ++i) {
    sums[i] = ((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]));
  }
  return sums;
#endif
}

// Sum of the lanes, in one fixed order.
OCTAVO_INLINE float sum(F8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

OCTAVO_INLINE float greatest(F8 v) {
  float result = v[0];
  for (int i = 1; i < 8; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

OCTAVO_INLINE F8 load_f16(const uint16_t* p) {
#if OCTAVO_SIMD_AVX2
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  I8 half;
  for (int i = 0; i < 8; ++i) half[i] = p[i];
  // The exponent is rebased by a multiplication, which also makes subnormal halves normal floats.
  const I8 magnitude = half & 0x7fff;
  const F8 finite = as_floats(magnitude << 13) * splat(0x1p112f);
  const I8 infinite_or_nan = (magnitude << 13) | 0x7f800000;
  const I8 bits = magnitude >= 0x7c00 ? infinite_or_nan : as_ints(finite);
  return as_floats(bits | ((half & 0x8000) << 16));
#endif
}

OCTAVO_INLINE F8 load_bf16(const uint16_t* p) {
#if OCTAVO_SIMD_AVX2
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (F8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  I8 bits;
  for (int i = 0; i < 8; ++i) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return as_floats(bits);
#endif
}

// The eight numbers rounded to nearest, ties to even; the same bits as f16_of and bf16_of in half.h.
OCTAVO_INLINE void store_f16(uint16_t* p, F8 v) {
#if OCTAVO_SIMD_AVX2
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < 8; ++i) p[i] = f16_of(v[i]);
#endif
}

OCTAVO_INLINE void store_bf16(uint16_t* p, F8 v) {
  const I8 bits = as_ints(v);
  const I8 upper = bits >> 16;
  const I8 rounded = (bits + 0x7fff + (upper & 1)) >> 16;
  const I8 halves = (bits & 0x7fffffff) > 0x7f800000 ? upper | 0x40 : rounded;  // NaN stays one
  for (int i = 0; i < 8; ++i) p[i] = static_cast<uint16_t>(halves[i]);
}

// 2^fraction for |fraction| <= 0.5 times 2^n, where the low bits of `shifted` (a float near 1.5 * 2^23) hold n.
OCTAVO_INLINE F8 scale_by_power_of_two(F8 value, F8 shifted) {
  return value * as_floats((as_ints(shifted) + 127) << 23);
}

constexpr float kRoundShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even

// Minimax for 2^f on [-0.5, 0.5] with constant term 1, highest power first.
constexpr int kNumExp2 = 7;
constexpr float kExp2[kNumExp2] = {
    0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f, 1.0f};

// 2^x, relative error below 1e-7; exactly 1 at 0; 0 below -126 (so also at minus infinity); x <= 127; NaN stays NaN.
OCTAVO_INLINE F8 exp2(F8 x) {
  const F8 clamped = max(splat(-126.0f), x);
  const F8 shifted = clamped + splat(kRoundShift);
  const F8 f = clamped - (shifted - splat(kRoundShift));
  F8 p = splat(kExp2[0]);
  for (int i = 1; i < kNumExp2; ++i) p = mul_add(p, f, splat(kExp2[i]));
  const F8 result = scale_by_power_of_two(p, shifted);
  return select(x < splat(-126.0f), splat(0.0f), result);
}

// e^x with x clamped to [-87, 88]; exactly 1 at 0; NaN stays NaN.
OCTAVO_INLINE F8 exp(F8 x) {
  const F8 clamped = min(splat(88.0f), max(splat(-87.0f), x));
  const F8 shifted = mul_add(clamped, splat(0x1.715476p+0f), splat(kRoundShift));
  const F8 n = shifted - splat(kRoundShift);
  F8 f = mul_add(n, splat(-0.693359375f), clamped);  // ln 2 in two parts: n * high part is exact
  f = mul_add(n, splat(2.12194440e-4f), f);
  F8 p = splat(0x1.6ae0dep-10f);  // minimax for e^f on [-0.35, 0.35] with constant term 1
  p = mul_add(p, f, splat(0x1.126e4cp-7f));
  p = mul_add(p, f, splat(0x1.55584p-5f));
  p = mul_add(p, f, splat(0x1.55540cp-3f));
  p = mul_add(p, f, splat(0x1.fffffcp-2f));
  p = mul_add(p, f, splat(1.0f));
  p = mul_add(p, f, splat(1.0f));
  return scale_by_power_of_two(p, shifted);
}

}  // namespace octavo::OCTAVO_SIMD
