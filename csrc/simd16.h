// Sixteen floats at a time: one register with AVX-512, two vectors of eight elsewhere. Lane by lane the same operations
// either way, so AVX2 and AVX-512 code of one source gives the same bits.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_SIMD {

#if defined(__AVX512F__)

typedef float V16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));

OCTAVO_INLINE V16 load16(const float* p) {
  V16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE V16 load16_f16(const uint16_t* p) {
  return (V16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

OCTAVO_INLINE V16 load16_bf16(const uint16_t* p) {
  typedef uint16_t H16 __attribute__((vector_size(32)));
  H16 halves;
  std::memcpy(&halves, p, sizeof halves);
  return (V16)(__builtin_convertvector(halves, I16) << 16);
}

// Sixteen pairs of bf16: the first of each, and the second.
OCTAVO_INLINE void load16_bf16_pairs(const uint16_t* p, V16* first, V16* second) {
  I16 pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  *first = (V16)(pairs << 16);
  *second = (V16)(pairs & int32_t(0xffff0000));
}

OCTAVO_INLINE void store16(float* p, V16 v) { std::memcpy(p, &v, sizeof v); }

OCTAVO_INLINE V16 splat16(float x) { return (V16)_mm512_set1_ps(x); }

OCTAVO_INLINE V16 mul_add(V16 a, V16 b, V16 c) { return (V16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

OCTAVO_INLINE F8 low_half(V16 v) { return (F8)_mm512_castps512_ps256((__m512)v); }
OCTAVO_INLINE F8 high_half(V16 v) { return (F8)_mm512_extractf32x8_ps((__m512)v, 1); }
OCTAVO_INLINE V16 join(F8 low, F8 high) {
  return (V16)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)low), (__m256)high, 1);
}

OCTAVO_INLINE V16 max(V16 a, V16 b) { return (V16)_mm512_max_ps((__m512)a, (__m512)b); }

OCTAVO_INLINE bool any_above(V16 v, float bound) {
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
}

// Lanes [begin, end) of `v`, and `other` in the rest.
OCTAVO_INLINE V16 select_lanes(int begin, int end, V16 v, V16 other) {
  const unsigned mask = (0xffffu >> (16 - (end - begin))) << begin;
  return (V16)_mm512_mask_blend_ps(static_cast<__mmask16>(mask), (__m512)other, (__m512)v);
}

OCTAVO_INLINE V16 exp2(V16 x) {
  const V16 clamped = max(splat16(-126.0f), x);
  const V16 shifted = clamped + splat16(kRoundShift);
  const V16 f = clamped - (shifted - splat16(kRoundShift));
  V16 p = splat16(kExp2[0]);
  for (int i = 1; i < kNumExp2; ++i) p = mul_add(p, f, splat16(kExp2[i]));
  const V16 result = p * (V16)(((I16)shifted + 127) << 23);
  const __mmask16 is_low = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_LT_OQ);
  return (V16)_mm512_mask_mov_ps((__m512)result, is_low, _mm512_setzero_ps());
}

#else

struct V16 {
  F8 low, high;
};

OCTAVO_INLINE V16 load16(const float* p) { return {load(p), load(p + 8)}; }
OCTAVO_INLINE V16 load16_f16(const uint16_t* p) { return {load_f16(p), load_f16(p + 8)}; }
OCTAVO_INLINE V16 load16_bf16(const uint16_t* p) { return {load_bf16(p), load_bf16(p + 8)}; }

// Sixteen pairs of bf16: the first of each, and the second.
OCTAVO_INLINE void load16_bf16_pairs(const uint16_t* p, V16* first, V16* second) {
  I8 low, high;
  std::memcpy(&low, p, sizeof low);
  std::memcpy(&high, p + 16, sizeof high);
  *first = {as_floats(low << 16), as_floats(high << 16)};
  *second = {as_floats(low & int32_t(0xffff0000)), as_floats(high & int32_t(0xffff0000))};
}

OCTAVO_INLINE void store16(float* p, V16 v) {
  store(p, v.low);
  store(p + 8, v.high);
}

OCTAVO_INLINE V16 splat16(float x) { return {splat(x), splat(x)}; }

OCTAVO_INLINE V16 operator-(V16 a, V16 b) { return {a.low - b.low, a.high - b.high}; }
OCTAVO_INLINE V16 operator*(V16 a, V16 b) { return {a.low * b.low, a.high * b.high}; }

OCTAVO_INLINE V16 mul_add(V16 a, V16 b, V16 c) {
  return {mul_add(a.low, b.low, c.low), mul_add(a.high, b.high, c.high)};
}

OCTAVO_INLINE F8 low_half(V16 v) { return v.low; }
OCTAVO_INLINE F8 high_half(V16 v) { return v.high; }
OCTAVO_INLINE V16 join(F8 low, F8 high) { return {low, high}; }

OCTAVO_INLINE bool any_above(V16 v, float bound) { return any(max(v.low, v.high) > splat(bound)); }

// Lanes [begin, end) of `v`, and `other` in the rest.
OCTAVO_INLINE V16 select_lanes(int begin, int end, V16 v, V16 other) {
  const I8 places = {0, 1, 2, 3, 4, 5, 6, 7};
  const I8 is_low = (places >= begin) & (places < end);
  const I8 is_high = (places + 8 >= begin) & (places + 8 < end);
  return {select(is_low, v.low, other.low), select(is_high, v.high, other.high)};
}

OCTAVO_INLINE V16 exp2(V16 x) { return {exp2(x.low), exp2(x.high)}; }

#endif

}  // namespace octavo::OCTAVO_SIMD
