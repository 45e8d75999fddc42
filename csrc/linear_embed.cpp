// Single rows out of packed weights, dequantised exactly as the file's format defines them.
#include <cstring>

#include "half.h"
#include "linear_layout.h"

namespace octavo {
namespace {

float half_at(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return f32_of_f16(half);
}

// Number `k` (0..31) of output `lane` in a packed group of nibbles.
int nibble_at(const uint8_t* group, int lane, int k) {
  return (group[k % 16 / 4 * 64 + 4 * lane + k % 4] >> (4 * (k / 16))) & 15;
}

void read_floats(const PackedPart& part, const uint8_t* panel, int lane, int64_t num_inputs, float* out) {
  for (int64_t k = 0; k < num_inputs; ++k) {
    if (part.kind == WeightKind::f32) {
      std::memcpy(out + k, panel + (k * kPanelOutputs + lane) * 4, 4);
      continue;
    }
    uint16_t half;
    std::memcpy(&half, panel + (k * kPanelOutputs + lane) * 2, 2);
    out[k] = part.kind == WeightKind::f16 ? f32_of_f16(half) : f32_of_bf16(half);
  }
}

// The functions below read one group of 32: `scales` are those of its block, `index` its place in the block.

void read_int8(const uint8_t* scales, const uint8_t* group, int index, int lane, float* out) {
  const float scale = half_at(scales + 32 * index + 2 * lane);
  for (int k = 0; k < kGroupInputs; ++k) {
    out[k] = scale * static_cast<float>(static_cast<int8_t>(group[k / 2 * 32 + 2 * lane + k % 2]));
  }
}

void read_q4_0(const uint8_t* scales, const uint8_t* group, int index, int lane, float* out) {
  const float scale = half_at(scales + 32 * index + 2 * lane);
  for (int k = 0; k < kGroupInputs; ++k) out[k] = scale * static_cast<float>(nibble_at(group, lane, k) - 8);
}

void read_q4_1(const uint8_t* scales, const uint8_t* group, int index, int lane, float* out) {
  const float scale = half_at(scales + 64 * index + 2 * lane);
  const float minimum = half_at(scales + 64 * index + 32 + 2 * lane);
  for (int k = 0; k < kGroupInputs; ++k) out[k] = scale * static_cast<float>(nibble_at(group, lane, k)) + minimum;
}

void read_q4_k(const uint8_t* scales, const uint8_t* group, int index, int lane, float* out) {
  const auto byte = [&](int i) { return static_cast<int>(scales[64 + 16 * i + lane]); };
  const bool is_first = index < 4;
  const int scale6 = is_first ? byte(index) & 63 : (byte(index + 4) & 15) | (byte(index - 4) >> 6) << 4;
  const int minimum6 = is_first ? byte(index + 4) & 63 : byte(index + 4) >> 4 | (byte(index) >> 6) << 4;
  const float scale = half_at(scales + 2 * lane) * static_cast<float>(scale6);
  const float minimum = half_at(scales + 32 + 2 * lane) * static_cast<float>(minimum6);
  for (int k = 0; k < kGroupInputs; ++k) out[k] = scale * static_cast<float>(nibble_at(group, lane, k)) - minimum;
}

void read_q6_k(const uint8_t* scales, const uint8_t* group, int index, int lane, float* out) {
  const float d = half_at(scales + 2 * lane);
  for (int k = 0; k < kGroupInputs; ++k) {
    const auto scale = static_cast<int8_t>(scales[32 + 16 * (2 * index + k / 16) + lane]);
    const int high = (group[256 + k / 16 * 64 + 4 * lane + k % 4] >> (2 * (k % 16 / 4))) & 3;
    const int number = (nibble_at(group, lane, k) | high << 4) - 32;
    out[k] = d * static_cast<float>(scale) * static_cast<float>(number);
  }
}

void read_group(WeightKind kind, const uint8_t* scales, const uint8_t* group, int index, int lane, float* out) {
  switch (kind) {
    case WeightKind::int8:
      return read_int8(scales, group, index, lane, out);
    case WeightKind::q4_0:
      return read_q4_0(scales, group, index, lane, out);
    case WeightKind::q4_1:
      return read_q4_1(scales, group, index, lane, out);
    case WeightKind::q4_k:
      return read_q4_k(scales, group, index, lane, out);
    default:
      return read_q6_k(scales, group, index, lane, out);
  }
}

void read_row(const PackedPart& part, int64_t row, int64_t num_inputs, float* out) {
  const uint8_t* panel = part.panels.get() + row / kPanelOutputs * part.panel_bytes;
  const int lane = static_cast<int>(row % kPanelOutputs);
  if (!is_quantised(part.kind)) return read_floats(part, panel, lane, num_inputs, out);
  const uint8_t* block = panel;
  for (int64_t left = num_inputs / kGroupInputs; left > 0; left -= kBlockGroups) {
    const int count = static_cast<int>(left < kBlockGroups ? left : kBlockGroups);
    const uint8_t* group = block + count * part.layout.scale_bytes;
    for (int index = 0; index < count; ++index, group += part.layout.weight_bytes, out += kGroupInputs) {
      read_group(part.kind, block, group, index, lane, out);
    }
    block = group;
  }
}

}  // namespace

void embed_rows(const PackedLinear& weights, const int32_t* token_ids, int num_rows, float scale, float* out,
                int64_t out_stride) {
  for (int r = 0; r < num_rows; ++r) {
    int64_t row = token_ids[r];
    const PackedPart* part = weights.parts.data();
    for (; row >= part->num_outputs; ++part) row -= part->num_outputs;
    float* to = out + r * out_stride;
    read_row(*part, row, weights.num_inputs, to);
    if (scale == 1.0f) continue;
    for (int64_t k = 0; k < weights.num_inputs; ++k) to[k] *= scale;
  }
}

}  // namespace octavo
