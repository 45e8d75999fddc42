#include "quant_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"
#include "linear_layout.h"

namespace octavo {
namespace {

constexpr int kBlock = kGroupInputs;
constexpr float kGreatestHalf = 65504.0f;

bool write_int8(const float* x, uint8_t* to) {
  float greatest = 0.0f;
  for (int i = 0; i < kBlock; ++i) greatest = std::max(greatest, std::fabs(x[i]));
  const uint16_t half = f16_of(greatest / 127.0f);
  const float scale = f32_of_f16(half);
  if (!(scale <= kGreatestHalf)) return false;
  std::memcpy(to, &half, sizeof half);
  for (int i = 0; i < kBlock; ++i) {
    const float number = scale > 0.0f ? std::nearbyint(x[i] / scale) : 0.0f;
    to[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(number, -127.0f, 127.0f)));
  }
  return true;
}

struct Fit {
  uint16_t scale;
  uint16_t minimum;
  float numbers[kBlock];  // 0..15
  double error;           // sum of squares
};

// Rounds a block with this scale and minimum, both rounded to f16 first.
Fit fit_with(const float* x, float scale, float minimum) {
  Fit fit;
  fit.scale = f16_of(scale);
  fit.minimum = f16_of(minimum);
  fit.error = 0.0;
  const float d = f32_of_f16(fit.scale);
  const float m = f32_of_f16(fit.minimum);
  for (int i = 0; i < kBlock; ++i) {
    fit.numbers[i] = d > 0.0f ? std::clamp(std::nearbyint((x[i] - m) / d), 0.0f, 15.0f) : 0.0f;
    const double miss = static_cast<double>(d) * fit.numbers[i] + m - x[i];
    fit.error += miss * miss;
  }
  return fit;
}

// Scale and minimum that least squares gives for the numbers of a fit.
Fit refit(const float* x, const Fit& fit) {
  double sum_q = 0.0;
  double sum_qq = 0.0;
  double sum_x = 0.0;
  double sum_qx = 0.0;
  for (int i = 0; i < kBlock; ++i) {
    const double q = fit.numbers[i];
    sum_q += q;
    sum_qq += q * q;
    sum_x += x[i];
    sum_qx += q * x[i];
  }
  const double spread = kBlock * sum_qq - sum_q * sum_q;
  if (spread <= 0.0) return fit;
  const double scale = (kBlock * sum_qx - sum_q * sum_x) / spread;
  return fit_with(x, static_cast<float>(scale), static_cast<float>((sum_x - scale * sum_q) / kBlock));
}

bool write_q4_1(const float* x, uint8_t* to) {
  const auto [least, greatest] = std::minmax_element(x, x + kBlock);
  const float scale = (*greatest - *least) / 15.0f;
  if (!(scale <= kGreatestHalf && std::fabs(*least) <= kGreatestHalf)) return false;
  Fit best = fit_with(x, scale, *least);
  Fit next = best;
  for (int round = 0; round < 2; ++round) {
    next = refit(x, next);
    if (next.error < best.error) best = next;
  }
  std::memcpy(to, &best.scale, 2);
  std::memcpy(to + 2, &best.minimum, 2);
  for (int i = 0; i < 16; ++i) {
    const int low = static_cast<int>(best.numbers[i]);
    const int high = static_cast<int>(best.numbers[16 + i]);
    to[4 + i] = static_cast<uint8_t>(low | high << 4);
  }
  return true;
}

// Infinite and NaN values turn the sum of 0 * x into NaN.
bool all_finite(const float* x) {
  float sum = 0.0f;
  for (int i = 0; i < kBlock; ++i) sum += 0.0f * x[i];
  return sum == 0.0f;
}

}  // namespace

bool quantise_weights(WeightKind kind, const float* values, int64_t num_rows, int64_t num_inputs, uint8_t* to) {
  if (kind != WeightKind::int8 && kind != WeightKind::q4_1) throw std::invalid_argument("quantise: int8 or q4_1 only");
  if (num_inputs % kBlock != 0) throw std::invalid_argument("quantise: rows must be whole groups of 32");
  const int64_t block_bytes = file_row_bytes(kind, kBlock);
  for (int64_t block = 0; block < num_rows * num_inputs / kBlock; ++block, values += kBlock, to += block_bytes) {
    if (!all_finite(values)) return false;
    if (!(kind == WeightKind::int8 ? write_int8(values, to) : write_q4_1(values, to))) return false;
  }
  return true;
}

}  // namespace octavo
