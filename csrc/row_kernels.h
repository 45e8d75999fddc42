// Kernels on single rows, compiled once per instruction set (included by kernels_*.cpp only).
//
// Rotations round the same in every build and in the reference: products and sums are separate operations here,
// whatever the hardware could fuse.
#pragma once

#include <cmath>

#include "simd.h"

namespace octavo::OCTAVO_SIMD {

inline void rms_norm(const float* x, const float* weight, float* out, int width, float eps) {
  F8 squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int i = 0;
  for (; i + 32 <= width; i += 32) {
    for (int j = 0; j < 4; ++j) {
      const F8 v = load(x + i + 8 * j);
      squares[j] = mul_add(v, v, squares[j]);
    }
  }
  for (; i + 8 <= width; i += 8) {
    const F8 v = load(x + i);
    squares[0] = mul_add(v, v, squares[0]);
  }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < width; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  const F8 factors = splat(factor);
  for (i = 0; i + 8 <= width; i += 8) store(out + i, load(x + i) * factors * load(weight + i));
  for (; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

inline void add(float* x, const float* y, int width) {
  int i = 0;
  for (; i + 8 <= width; i += 8) store(x + i, load(x + i) + load(y + i));
  for (; i < width; ++i) x[i] += y[i];
}

inline float total_of(const float* x, int width) {
  F8 parts[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int i = 0;
  for (; i + 32 <= width; i += 32) {
    for (int j = 0; j < 4; ++j) parts[j] = parts[j] + load(x + i + 8 * j);
  }
  for (; i + 8 <= width; i += 8) parts[0] = parts[0] + load(x + i);
  float total = sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (; i < width; ++i) total += x[i];
  return total;
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float* out, int width, float eps) {
  const float mean = total_of(x, width) / static_cast<float>(width);
  const F8 means = splat(mean);
  F8 squares = splat(0.0f);
  int i = 0;
  for (; i + 8 <= width; i += 8) {
    const F8 centred = load(x + i) - means;
    squares = mul_add(centred, centred, squares);
  }
  float total = sum(squares);
  for (; i < width; ++i) total += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  const F8 factors = splat(factor);
  for (i = 0; i + 8 <= width; i += 8) {
    store(out + i, mul_add((load(x + i) - means) * factors, load(weight + i), load(bias + i)));
  }
  for (; i < width; ++i) out[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

struct Silu {
  OCTAVO_INLINE F8 of(F8 x) { return x / (splat(1.0f) + exp(-x)); }
};
// The tanh form of GELU, as x times a sigmoid.
struct GeluTanh {
  OCTAVO_INLINE F8 of(F8 x) {
    const F8 argument = splat(1.5957691216057308f) * mul_add(splat(0.044715f) * x * x, x, x);
    return x / (splat(1.0f) + exp(-argument));
  }
};

template <class Function>
OCTAVO_INLINE void activate_with(const float* x, const float* up, float* out, int width) {
  int i = 0;
  for (; i + 8 <= width; i += 8) {
    const F8 activated = Function::of(load(x + i));
    store(out + i, up == nullptr ? activated : activated * load(up + i));
  }
  if (i < width) {
    float rest[8] = {};
    for (int j = i; j < width; ++j) rest[j - i] = x[j];
    const F8 activated = Function::of(load(rest));
    for (int j = i; j < width; ++j) out[j] = up == nullptr ? activated[j - i] : activated[j - i] * up[j];
  }
}

inline void activate(const float* x, float* out, int width, Activation activation, bool has_gate) {
  const float* up = has_gate ? x + width : nullptr;
  if (activation == Activation::silu) return activate_with<Silu>(x, up, out, width);
  return activate_with<GeluTanh>(x, up, out, width);
}

// tanh(x) = 1 - 2 / (1 + e^2x); its absolute error, not its relative one, is what a bound on scores asks for.
OCTAVO_INLINE F8 soft_capped(F8 x, float cap) {
  const F8 shares = splat(2.0f) / (splat(1.0f) + exp(x * splat(2.0f / cap)));
  return splat(cap) - splat(cap) * shares;
}

inline void soft_cap(float* x, int width, float cap) {
  int i = 0;
  for (; i + 8 <= width; i += 8) store(x + i, soft_capped(load(x + i), cap));
  if (i < width) {
    float rest[8] = {};
    for (int j = i; j < width; ++j) rest[j - i] = x[j];
    const F8 capped = soft_capped(load(rest), cap);
    for (int j = i; j < width; ++j) x[j] = capped[j - i];
  }
}

inline void rotate(float* head, const float* cosines, const float* sines, int half) {
  int i = 0;
  for (; i + 8 <= half; i += 8) {
    const F8 a = load(head + i), b = load(head + half + i);
    const F8 c = load(cosines + i), s = load(sines + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

}  // namespace octavo::OCTAVO_SIMD
