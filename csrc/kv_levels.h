// Levels: what the codes of quantised keys and values stand for, before their token's scale; compiled once per
// instruction set. Reading is exact, so every build sees the same numbers.
//
//     int8        the code itself, -127 .. 127
//     fp8_e4m3    the number / 256: moved to the bits of an f16, whose exponent counts from 15 where e4m3's counts from
//     7 int4        16 x the code, -128 .. 112: a code in the upper half of a byte is that as it stands
//
// Scales make up for the powers of two.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd16.h"

namespace octavo::OCTAVO_SIMD {

#if OCTAVO_SIMD_AVX2

OCTAVO_INLINE __m128i load_bytes8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
OCTAVO_INLINE __m128i load_bytes16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

OCTAVO_INLINE F8 floats_of_bytes8(__m128i bytes) { return (F8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

OCTAVO_INLINE V16 floats_of_bytes16(__m128i bytes) {
#if defined(__AVX512F__)
  return (V16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  return {floats_of_bytes8(bytes), floats_of_bytes8(_mm_srli_si128(bytes, 8))};
#endif
}

// The lower and the upper code of each byte, in the upper half of a byte.
OCTAVO_INLINE __m128i lower_codes(__m128i bytes) {
  return _mm_and_si128(_mm_slli_epi16(bytes, 4), _mm_set1_epi8(static_cast<char>(0xf0)));
}
OCTAVO_INLINE __m128i upper_codes(__m128i bytes) {
  return _mm_and_si128(bytes, _mm_set1_epi8(static_cast<char>(0xf0)));
}

OCTAVO_INLINE F8 int8_levels8(const uint8_t* p) { return floats_of_bytes8(load_bytes8(p)); }
OCTAVO_INLINE V16 int8_levels16(const uint8_t* p) { return floats_of_bytes16(load_bytes16(p)); }

OCTAVO_INLINE F8 e4m3_levels8(const uint8_t* p) {
  // The sign is spread over bits 15 and 14 of a half; the exponent's highest bit is 0.
  const __m128i spread = _mm_slli_epi16(_mm_cvtepi8_epi16(load_bytes8(p)), 7);
  return (F8)_mm256_cvtph_ps(_mm_and_si128(spread, _mm_set1_epi16(static_cast<short>(0xbfff))));
}
OCTAVO_INLINE V16 e4m3_levels16(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m256i spread = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes16(p)), 7);
  return (V16)_mm512_cvtph_ps(_mm256_and_si256(spread, _mm256_set1_epi16(static_cast<short>(0xbfff))));
#else
  return {e4m3_levels8(p), e4m3_levels8(p + 8)};
#endif
}

// Of consecutive numbers, two to a byte.
OCTAVO_INLINE F8 int4_levels8(const uint8_t* p) {
  int32_t packed;
  std::memcpy(&packed, p, sizeof packed);
  const __m128i bytes = _mm_cvtsi32_si128(packed);
  return floats_of_bytes8(_mm_unpacklo_epi8(lower_codes(bytes), upper_codes(bytes)));
}
OCTAVO_INLINE V16 int4_levels16(const uint8_t* p) {
  const __m128i bytes = load_bytes8(p);
  return floats_of_bytes16(_mm_unpacklo_epi8(lower_codes(bytes), upper_codes(bytes)));
}

// Of two dimensions of 16 tokens, a byte per token.
OCTAVO_INLINE void int4_level_pairs(const uint8_t* p, V16* levels) {
  const __m128i bytes = load_bytes16(p);
  levels[0] = floats_of_bytes16(lower_codes(bytes));
  levels[1] = floats_of_bytes16(upper_codes(bytes));
}

#else

OCTAVO_INLINE float int4_level(int code) { return static_cast<float>(static_cast<int8_t>(code << 4)); }

OCTAVO_INLINE F8 int8_levels8(const uint8_t* p) {
  F8 levels;
  for (int i = 0; i < 8; ++i) levels[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return levels;
}
OCTAVO_INLINE F8 e4m3_levels8(const uint8_t* p) {
  uint16_t halves[8];
  for (int i = 0; i < 8; ++i) halves[i] = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
  return load_f16(halves);
}
OCTAVO_INLINE F8 int4_levels8(const uint8_t* p) {
  F8 levels;
  for (int i = 0; i < 8; ++i) levels[i] = int4_level(p[i / 2] >> (i % 2 * 4) & 0xf);
  return levels;
}

OCTAVO_INLINE V16 int8_levels16(const uint8_t* p) { return {int8_levels8(p), int8_levels8(p + 8)}; }
OCTAVO_INLINE V16 e4m3_levels16(const uint8_t* p) { return {e4m3_levels8(p), e4m3_levels8(p + 8)}; }
OCTAVO_INLINE V16 int4_levels16(const uint8_t* p) { return {int4_levels8(p), int4_levels8(p + 4)}; }

OCTAVO_INLINE void int4_level_pairs(const uint8_t* p, V16* levels) {
  for (int i = 0; i < 8; ++i) {
    levels[0].low[i] = int4_level(p[i] & 0xf);
    levels[0].high[i] = int4_level(p[i + 8] & 0xf);
    levels[1].low[i] = int4_level(p[i] >> 4);
    levels[1].high[i] = int4_level(p[i + 8] >> 4);
  }
}

#endif

}  // namespace octavo::OCTAVO_SIMD
