// Writing keys and values into tiles, compiled once per instruction set (included by kernels_*.cpp only).
//
// What is stored has the same bits in every build and in the reference (runtime/kv_codes.py): rounding to nearest, ties
// to even, and divisions instead of products with a reciprocal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kv_layout.h"
#include "simd.h"

namespace octavo::OCTAVO_SIMD {

struct RoundToF32 {
  using Type = float;
  OCTAVO_INLINE void store8(float* p, F8 v) { store(p, v); }
};
struct RoundToF16 {
  using Type = uint16_t;
  OCTAVO_INLINE void store8(uint16_t* p, F8 v) { store_f16(p, v); }
};
struct RoundToBf16 {
  using Type = uint16_t;
  OCTAVO_INLINE void store8(uint16_t* p, F8 v) { store_bf16(p, v); }
};

template <class Rounding>
OCTAVO_INLINE void round_row(const float* from, int count, typename Rounding::Type* to) {
  int i = 0;
  for (; i + 8 <= count; i += 8) Rounding::store8(to + i, load(from + i));
  if (i < count) {
    float rest[8] = {};
    typename Rounding::Type rounded[8];
    for (int j = i; j < count; ++j) rest[j - i] = from[j];
    Rounding::store8(rounded, load(rest));
    for (int j = i; j < count; ++j) to[j] = rounded[j - i];
  }
}

template <class Rounding>
OCTAVO_INLINE void store_rounded(const KvLayout& layout, std::byte* tile, int place, const float* key,
                                 const float* value) {
  using Type = typename Rounding::Type;
  constexpr int kPiece = 64;
  Type* keys = reinterpret_cast<Type*>(tile);
  Type rounded[kPiece];
  for (int begin = 0; begin < layout.head_dim; begin += kPiece) {
    const int count = layout.head_dim - begin < kPiece ? layout.head_dim - begin : kPiece;
    round_row<Rounding>(key + begin, count, rounded);
    for (int d = 0; d < count; ++d) keys[KvLayout::key_element(begin + d, place)] = rounded[d];
  }
  Type* values = reinterpret_cast<Type*>(tile + layout.values_after_keys() + layout.value_row(place));
  round_row<Rounding>(value, layout.head_dim, values);
}

// --- quantised rows
//
// A row (a token's key or value of one head) has one scale: its number of largest magnitude over the level of largest
// magnitude, rounded away from zero to bf16, so that no level is left out and every row of finite floats has a finite
// one. A row of zeros has scale 0. A row with NaN or infinity has scale NaN and reads as NaN, whatever its codes: it is
// lost as a whole, and nothing else is.

// The largest and the smallest number of a row, and the bits of its largest magnitude: not finite if any number is not.
struct Extent {
  float highest;
  float lowest;
  int32_t magnitude;
};

OCTAVO_INLINE Extent extent_of(const float* row, int count) {
  Extent extent{row[0], row[0], 0};
  int i = 0;
  if (count >= 8) {
    F8 highest = load(row), lowest = highest;
    I8 magnitude = as_ints(highest) & 0x7fffffff;
    for (i = 8; i + 8 <= count; i += 8) {
      const F8 v = load(row + i);
      const I8 bits = as_ints(v) & 0x7fffffff;
      highest = max(v, highest);
      lowest = min(v, lowest);
      magnitude = bits > magnitude ? bits : magnitude;
    }
    extent.highest = greatest(highest);
    extent.lowest = -greatest(-lowest);
    for (int lane = 0; lane < 8; ++lane) {
      extent.magnitude = magnitude[lane] > extent.magnitude ? magnitude[lane] : extent.magnitude;
    }
  }
  for (; i < count; ++i) {
    extent.highest = row[i] > extent.highest ? row[i] : extent.highest;
    extent.lowest = row[i] < extent.lowest ? row[i] : extent.lowest;
    const int32_t bits = static_cast<int32_t>(bits_of(row[i]) & 0x7fffffff);
    extent.magnitude = bits > extent.magnitude ? bits : extent.magnitude;
  }
  return extent;
}

// bf16 bits of a scale: magnitudes are rounded up. Only finite numbers get here, and none close to overflow.
OCTAVO_INLINE uint16_t scale_bits(float scale) { return static_cast<uint16_t>((bits_of(scale) + 0xffff) >> 16); }

constexpr uint16_t kNaNScale = 0x7fc0;

// What scale a row gets, and how eight of its numbers, divided by that, become codes.
struct QuantiseInt8 {
  OCTAVO_INLINE float scale_of(const Extent& extent) { return float_of(uint32_t(extent.magnitude)) / 127.0f; }
  OCTAVO_INLINE I8 codes(F8 quotient) { return as_ints(quotient + splat(kRoundShift)) & 0xff; }
};

struct QuantiseE4m3 {
  // 448, the largest number, is level 1.75.
  OCTAVO_INLINE float scale_of(const Extent& extent) { return float_of(uint32_t(extent.magnitude)) / 1.75f; }
  OCTAVO_INLINE I8 codes(F8 quotient) {
    const F8 number = quotient * splat(256.0f);
    const I8 bits = as_ints(number);
    const I8 magnitude = bits & 0x7fffffff;
    const I8 normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    // Below 2^-6 numbers are multiples of 2^-9.
    const F8 multiple = as_floats(magnitude) * splat(512.0f) + splat(kRoundShift);
    const I8 subnormal = as_ints(multiple) - as_ints(splat(kRoundShift));
    const I8 code = magnitude < 0x3c800000 ? subnormal : normal;
    return code | ((bits >> 31) & 0x80);
  }
};

struct QuantiseInt4 {
  // Level -128 has no counterpart above zero, so the scale takes the sign that brings the extreme number there.
  OCTAVO_INLINE float scale_of(const Extent& extent) {
    return (extent.highest >= -extent.lowest ? extent.highest : extent.lowest) / -128.0f;
  }
  OCTAVO_INLINE I8 codes(F8 quotient) {
    const F8 code = min(splat(7.0f), quotient * splat(0.0625f));
    return as_ints(code + splat(kRoundShift)) & 0xf;
  }
};

// Codes of a row, a byte each; returns the bits of its scale.
template <class Quantise>
OCTAVO_INLINE uint16_t quantise_row(const float* row, int count, uint8_t* codes) {
  const Extent extent = extent_of(row, count);
  const bool is_finite = extent.magnitude < 0x7f800000;
  const uint16_t scale = is_finite ? scale_bits(Quantise::scale_of(extent)) : kNaNScale;
  const float divisor = f32_of_bf16(scale);
  if (!is_finite || divisor == 0.0f) {
    std::memset(codes, 0, size_t(count));
    return is_finite ? uint16_t(0) : kNaNScale;
  }
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    const I8 each = Quantise::codes(load(row + i) / splat(divisor));
    for (int lane = 0; lane < 8; ++lane) codes[i + lane] = static_cast<uint8_t>(each[lane]);
  }
  if (i < count) {
    float rest[8] = {};
    for (int j = i; j < count; ++j) rest[j - i] = row[j];
    const I8 each = Quantise::codes(load(rest) / splat(divisor));
    for (int j = i; j < count; ++j) codes[j] = static_cast<uint8_t>(each[j - i]);
  }
  return scale;
}

// Two codes a byte, in place: number 2i in the lower half of byte i.
OCTAVO_INLINE void pack_pairs(uint8_t* codes, int count) {
  for (int i = 0; i < count / 2; ++i) codes[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

template <class Quantise, int Numbers>
OCTAVO_INLINE void store_quantised(const KvLayout& layout, std::byte* tile, int place, const float* key,
                                   const float* value) {
  uint8_t codes[kMaxHeadDim];
  const int num_items = layout.head_dim / Numbers;
  const auto put_scale = [place](std::byte* scales, uint16_t scale) {
    std::memcpy(scales + size_t(place) * sizeof scale, &scale, sizeof scale);
  };
  put_scale(tile + layout.key_scales_after_keys(), quantise_row<Quantise>(key, layout.head_dim, codes));
  if constexpr (Numbers == 2) pack_pairs(codes, layout.head_dim);
  uint8_t* keys = reinterpret_cast<uint8_t*>(tile);
  for (int i = 0; i < num_items; ++i) keys[KvLayout::key_element(i, place)] = codes[i];
  put_scale(tile + layout.value_scales_after_keys(), quantise_row<Quantise>(value, layout.head_dim, codes));
  if constexpr (Numbers == 2) pack_pairs(codes, layout.head_dim);
  std::memcpy(tile + layout.values_after_keys() + layout.value_row(place), codes, size_t(num_items));
}

inline void store_kv(const KvLayout& layout, std::byte* tile, int place, const float* key, const float* value) {
  switch (layout.type) {
    case KvType::f32:
      return store_rounded<RoundToF32>(layout, tile, place, key, value);
    case KvType::f16:
      return store_rounded<RoundToF16>(layout, tile, place, key, value);
    case KvType::bf16:
      return store_rounded<RoundToBf16>(layout, tile, place, key, value);
    case KvType::int8:
      return store_quantised<QuantiseInt8, 1>(layout, tile, place, key, value);
    case KvType::fp8_e4m3:
      return store_quantised<QuantiseE4m3, 1>(layout, tile, place, key, value);
    case KvType::int4:
      return store_quantised<QuantiseInt4, 2>(layout, tile, place, key, value);
  }
}

}  // namespace octavo::OCTAVO_SIMD
