// Products in plain C++, for processors without kernels of their own: the same arithmetic as elsewhere, but multiply
// and add are rounded separately. Groups are unpacked to int16 [input][16 outputs], which compilers vectorise.
#include "half.h"
#include "linear_float.h"
#include "linear_kernels.h"
#include "linear_loop.h"

namespace octavo::OCTAVO_SIMD {
namespace {

float half_at(const uint8_t* at, int index) {
  uint16_t half;
  std::memcpy(&half, at + 2 * index, sizeof half);
  return f32_of_f16(half);
}

// The scale factors of a group: a weight is scale[sub-block] * q + minimum.
struct GroupScales {
  float scale[2][16];  // int8 and 4-bit kinds have one sub-block
  float minimum[16];
};

// `block` are the scales of a block, `j` is the place of a group in it.
void unpack_scales(WeightKind kind, const uint8_t* block, int j, GroupScales* scales) {
  switch (kind) {
    case WeightKind::int8:
      for (int o = 0; o < 16; ++o) scales->scale[0][o] = half_at(block + 32 * j, o);
      return;
    case WeightKind::q4_0:
      for (int o = 0; o < 16; ++o) {
        scales->scale[0][o] = half_at(block + 32 * j, o);
        scales->minimum[o] = -8.0f * scales->scale[0][o];
      }
      return;
    case WeightKind::q4_1:
      for (int o = 0; o < 16; ++o) {
        scales->scale[0][o] = half_at(block + 64 * j, o);
        scales->minimum[o] = half_at(block + 64 * j, 16 + o);
      }
      return;
    case WeightKind::q4_k:
      for (int o = 0; o < 16; ++o) {
        const auto byte = [&](int index) { return static_cast<int>(block[64 + 16 * index + o]); };
        const int scale = j < 4 ? byte(j) & 63 : (byte(j + 4) & 15) | (byte(j - 4) >> 6) << 4;
        const int minimum = j < 4 ? byte(j + 4) & 63 : byte(j + 4) >> 4 | (byte(j) >> 6) << 4;
        scales->scale[0][o] = half_at(block, o) * static_cast<float>(scale);
        scales->minimum[o] = -(half_at(block, 16 + o) * static_cast<float>(minimum));
      }
      return;
    default:  // q6_k
      for (int s = 0; s < 2; ++s) {
        for (int o = 0; o < 16; ++o) {
          const auto scale = static_cast<int8_t>(block[32 + 16 * (2 * j + s) + o]);
          scales->scale[s][o] = half_at(block, o) * static_cast<float>(scale);
        }
      }
  }
}

// `group` is the packed group; `to` becomes [32 inputs][16 outputs].
void unpack_numbers(WeightKind kind, const uint8_t* group, int16_t* to) {
  for (int k = 0; k < 32; ++k) {
    for (int o = 0; o < 16; ++o, ++to) {
      if (kind == WeightKind::int8) {
        *to = static_cast<int8_t>(group[k / 2 * 32 + 2 * o + k % 2]);
        continue;
      }
      const int low = (group[k % 16 / 4 * 64 + 4 * o + k % 4] >> (4 * (k / 16))) & 15;
      if (kind != WeightKind::q6_k) {
        *to = static_cast<int16_t>(low);
        continue;
      }
      const int high = (group[256 + k / 16 * 64 + 4 * o + k % 4] >> (2 * (k % 16 / 4))) & 3;
      *to = static_cast<int16_t>((low | high << 4) - 32);
    }
  }
}

template <WeightKind kKind>
class GroupKernel {
 public:
  static constexpr int kMaxTileRows = kTileRows;
  static constexpr int kPackedRows = 0;
  static constexpr int kPieceInputs = kChunkGroups * kGroupInputs;

  explicit GroupKernel(const PanelJob& job) : job_(job), numbers_(reinterpret_cast<int16_t*>(job.scratch)) {}

  void load(const uint8_t* panel, int64_t begin, int64_t end, bool) {
    begin_ = begin;
    num_groups_ = static_cast<int>((end - begin) / kGroupInputs);
    const uint8_t* block = panel + begin / kGroupInputs * (job_.scale_bytes + job_.weight_bytes);
    for (int first = 0; first < num_groups_; first += 8) {
      const int count = num_groups_ - first < 8 ? num_groups_ - first : 8;
      const uint8_t* group = block + count * job_.scale_bytes;
      for (int j = 0; j < count; ++j, group += job_.weight_bytes) {
        unpack_scales(kKind, block, j, &scales_[first + j]);
        unpack_numbers(kKind, group, numbers_ + 512 * (first + j));
      }
      block = group;
    }
  }

  void look_ahead(int, int) {}

  template <int kRows, bool>
  void tile(int row, float* out) const {
    const int64_t first_group = (row * job_.num_inputs + begin_ * kRows) / kGroupInputs;
    const int8_t* bytes = job_.quantised.bytes + first_group * kGroupInputs;
    const float* row_scales = job_.quantised.scales + first_group * 2;
    for (int i = 0; i < num_groups_; ++i, bytes += 32 * kRows, row_scales += 2 * kRows) {
      for (int r = 0; r < kRows; ++r) {
        float value[16];
        group_values(scales_[i], numbers_ + 512 * i, bytes + 4 * r, 4 * kRows, row_scales[kRows + r], value);
        for (int o = 0; o < 16; ++o) out[16 * r + o] += value[o] * row_scales[r];
      }
    }
  }

 private:
  // Products of one row's group, in units of the row's scale. `quads` are 4 inputs each, `quad_stride` bytes apart.
  static void group_values(const GroupScales& scales, const int16_t* numbers, const int8_t* quads, int quad_stride,
                           float row_sum, float* value) {
    constexpr int kSubBlocks = kKind == WeightKind::q6_k ? 2 : 1;
    constexpr int kInputs = kGroupInputs / kSubBlocks;
    for (int s = 0; s < kSubBlocks; ++s) {
      int32_t dot[16] = {};
      for (int k = s * kInputs; k < (s + 1) * kInputs; ++k) {
        const int16_t input = quads[k / 4 * quad_stride + k % 4];
        for (int o = 0; o < 16; ++o) dot[o] += static_cast<int32_t>(numbers[16 * k + o]) * input;
      }
      for (int o = 0; o < 16; ++o) {
        const float product = static_cast<float>(dot[o]) * scales.scale[s][o];
        if constexpr (kKind == WeightKind::q6_k) {
          value[o] = s == 0 ? product : value[o] + product;
        } else if constexpr (kKind == WeightKind::int8) {
          value[o] = product;
        } else {
          value[o] = product + row_sum * scales.minimum[o];
        }
      }
    }
  }

  const PanelJob& job_;
  int16_t* const numbers_;  // [group][32 inputs][16 outputs]
  GroupScales scales_[kChunkGroups];
  int64_t begin_ = 0;
  int num_groups_ = 0;
};

struct GroupScale {
  float scale;
  float inverse;
  bool is_finite;
};

// Scale of a group from the bits of its greatest magnitude.
GroupScale group_scale(int32_t greatest_bits) {
  if (greatest_bits >= kInfinityBits) return {float_of(kNanBits), 0.0f, false};
  if (greatest_bits < kTinyBits) return {0.0f, 0.0f, true};
  const float greatest = float_of(static_cast<uint32_t>(greatest_bits));
  return {greatest / 127.0f, 127.0f / greatest, true};
}

void quantise_group(const float* x, int8_t* numbers, float* scale, float* sum) {
  int32_t greatest = 0;
  for (int k = 0; k < kGroupInputs; ++k) {
    const auto magnitude = static_cast<int32_t>(bits_of(x[k]) & 0x7fffffff);
    greatest = magnitude > greatest ? magnitude : greatest;  // as integers: NaN is above everything
  }
  const GroupScale group = group_scale(greatest);
  int32_t total = 0;
  for (int k = 0; k < kGroupInputs; ++k) {
    const float rounded = (x[k] * group.inverse + kRoundShift) - kRoundShift;
    numbers[k] = group.is_finite ? static_cast<int8_t>(rounded) : int8_t{0};
    total += numbers[k];
  }
  *scale = group.scale;
  *sum = static_cast<float>(total);
}

void quantise_rows(const float* x, int64_t x_stride, int64_t num_inputs, int row_begin, int row_end,
                   const QuantisedRows& to) {
  const int64_t num_groups = num_inputs / kGroupInputs;
  for (int first = row_begin; first < row_end; first += kTileRows) {
    const int num_rows = row_end - first < kTileRows ? row_end - first : kTileRows;
    for (int r = 0; r < num_rows; ++r) {
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t slot = first * num_groups + group * num_rows;
        int8_t numbers[kGroupInputs];
        quantise_group(x + (first + r) * x_stride + group * kGroupInputs, numbers, to.scales + 2 * slot + r,
                       to.scales + 2 * slot + num_rows + r);
        int8_t* bytes = to.bytes + slot * kGroupInputs + 4 * r;
        for (int quad = 0; quad < 8; ++quad) std::memcpy(bytes + 4 * quad * num_rows, numbers + 4 * quad, 4);
      }
    }
  }
}

void run_panels(const PanelJob& job) {
  switch (job.kind) {
    case WeightKind::f32:
      return run_panels_of<FloatKernel<WeightKind::f32>>(job);
    case WeightKind::f16:
      return run_panels_of<FloatKernel<WeightKind::f16>>(job);
    case WeightKind::bf16:
      return run_panels_of<FloatKernel<WeightKind::bf16>>(job);
    case WeightKind::int8:
      return run_panels_of<GroupKernel<WeightKind::int8>>(job);
    case WeightKind::q4_0:
      return run_panels_of<GroupKernel<WeightKind::q4_0>>(job);
    case WeightKind::q4_1:
      return run_panels_of<GroupKernel<WeightKind::q4_1>>(job);
    case WeightKind::q4_k:
      return run_panels_of<GroupKernel<WeightKind::q4_k>>(job);
    case WeightKind::q6_k:
      return run_panels_of<GroupKernel<WeightKind::q6_k>>(job);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_SIMD

namespace octavo {

const LinearKernels kPortableLinearKernels = {OCTAVO_SIMD::quantise_rows, OCTAVO_SIMD::run_panels, false, "portable"};

}  // namespace octavo
