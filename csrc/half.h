// 16-bit floats, one number at a time, identical to what F16C does (round to nearest, ties to even).
//
// Static, so that each translation unit keeps the copy compiled for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint16_t f16_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 2^16 and more: infinity
  if (magnitude < 0x38800000) {
    // Subnormal or zero: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum.
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);  // may carry into infinity, as it should
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

static inline float f32_of_f16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude << 13));
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

static inline uint16_t bf16_of(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float f32_of_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

}  // namespace octavo
