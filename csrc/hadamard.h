// The Hadamard transform of a head's numbers, compiled once per instruction set.
//
// It spreads an outlier over all numbers of its block, so that few bits lose less, and leaves q . k unchanged, up to a
// power of two, when both are transformed. Blocks are as long as the largest power of two that divides head_dim. Each
// stage adds and subtracts pairs in a written-down order and nothing is rounded to fit, so every build gives the same
// bits; the reference is runtime/hadamard.py.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_SIMD {

// Length of the blocks that are transformed.
OCTAVO_INLINE int hadamard_block(int head_dim) { return head_dim & -head_dim; }

// One stage inside of eight numbers: number i meets number i ^ Half.
template <int Half>
OCTAVO_INLINE F8 hadamard_lanes(F8 v) {
  const I8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  F8 other;
#if OCTAVO_SIMD_AVX2
  if constexpr (Half == 4) {
    other = (F8)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
  } else {
    other = (F8)_mm256_permute_ps((__m256)v, Half == 1 ? 0xb1 : 0x4e);
  }
#else
  for (int i = 0; i < 8; ++i) other[i] = v[i ^ Half];
#endif
  return select((lanes & Half) == 0, v + other, other - v);
}

// Transforms `head_dim` numbers in place, unnormalised: twice gives block times the numbers.
inline void hadamard(float* x, int head_dim) {
  const int block = hadamard_block(head_dim);
  int half = 1;
  if (block >= 8) {
    for (int i = 0; i < head_dim; i += 8) {
      store(x + i, hadamard_lanes<4>(hadamard_lanes<2>(hadamard_lanes<1>(load(x + i)))));
    }
    half = 8;
  }
  for (; half < block; half *= 2) {
    for (int begin = 0; begin < head_dim; begin += 2 * half) {
      float* low = x + begin;
      float* high = low + half;
      if (half >= 8) {
        for (int i = 0; i < half; i += 8) {
          const F8 a = load(low + i), b = load(high + i);
          store(low + i, a + b);
          store(high + i, a - b);
        }
      } else {
        for (int i = 0; i < half; ++i) {
          const float a = low[i], b = high[i];
          low[i] = a + b;
          high[i] = a - b;
        }
      }
    }
  }
}

// The same divided by the block, a power of two: undoes `hadamard`, and prepares a query for keys that it transformed.
inline void hadamard_inverse(float* x, int head_dim) {
  hadamard(x, head_dim);
  const float factor = 1.0f / static_cast<float>(hadamard_block(head_dim));
  for (int d = 0; d < head_dim; ++d) x[d] *= factor;
}

}  // namespace octavo::OCTAVO_SIMD
