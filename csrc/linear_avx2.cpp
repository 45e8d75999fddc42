// Products with AVX2, FMA and F16C.
//
// 4-bit and 6-bit weights are unsigned bytes, activations signed: `maddubs` gives sums of two products in 16 bits,
// which are added up in 16 bits over a group. 4-bit: 16 products of at most 15 * 127 stay below 2^15. 6-bit: the sum of
// q * a over a sub-block may leave 16 bits, but the sum of (q - 32) * a may not, and sums modulo 2^16 that start from
// the sum of -32 * a end there. int8 weights are widened to 16 bits, where `madd` sums pairs in 32 bits.
#include <immintrin.h>

#include "linear_float.h"
#include "linear_kernels.h"
#include "linear_loop.h"

namespace octavo::OCTAVO_SIMD {
namespace {

constexpr int kPrefetchBytes = 4096;

OCTAVO_INLINE __m256i load_ints(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

OCTAVO_INLINE __m256i splat_word(const void* at) {
  int32_t word;
  std::memcpy(&word, at, sizeof word);
  return _mm256_set1_epi32(word);
}

OCTAVO_INLINE __m256 load_half_floats(const uint8_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Keeps the compiler from turning a chain of integer sums into a tree, which needs more registers than there are.
OCTAVO_INLINE void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

// A format says how a group of 32 inputs x 16 outputs is held and multiplied:
//   kSteps, kSubBlocks       steps of 4 bytes of a row's input, and sub-blocks with a scale of their own
//   kScaleBytes, kPackedBytes, kScales    bytes of scales and weights, and scale floats, of a group
//   load_scales(block, num_groups, to)    scales of a block of up to 8 groups, as floats
//   weights(group, step, half)     weights of outputs 8 * half ... + 7, ready to multiply
//   multiply, add, finish          products, their sum, and the sum of a sub-block as floats
//   value(...)                     what a group adds, in units of the row's scale

// A weight is scale * q + minimum, so a group adds scale * sum(q * a) + minimum * sum(a).
// Scales: [16] scale, [16] minimum. The products of half floats, 6-bit scales and sums are exact in float32.
template <WeightKind kKind>
struct Nibbles {
  static constexpr int kSteps = 8;
  static constexpr int kSubBlocks = 1;
  static constexpr int kScaleBytes = kKind == WeightKind::q4_1 ? 64 : 32;
  static constexpr int kPackedBytes = 256;
  static constexpr int kScales = 32;

  static void load_scales(const uint8_t* block, int num_groups, float* to) {
    for (int i = 0; i < num_groups; ++i, block += kScaleBytes, to += kScales) {
      for (int half = 0; half < 2; ++half) {
        const __m256 scale = load_half_floats(block + 16 * half);
        // q4_0 is scale * (q - 8)
        const __m256 minimum = kKind == WeightKind::q4_1 ? load_half_floats(block + 32 + 16 * half)
                                                         : _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
        _mm256_storeu_ps(to + 8 * half, scale);
        _mm256_storeu_ps(to + 16 + 8 * half, minimum);
      }
    }
  }

  OCTAVO_INLINE __m256i weights(const uint8_t* group, int step, int half) {
    const __m256i pair = load_ints(group + 64 * (step % 4) + 32 * half);
    return _mm256_and_si256(step < 4 ? pair : _mm256_srli_epi16(pair, 4), _mm256_set1_epi8(15));
  }

  OCTAVO_INLINE __m256i multiply(__m256i weights, __m256i input) { return _mm256_maddubs_epi16(weights, input); }
  OCTAVO_INLINE __m256i add(__m256i sum, __m256i product) { return _mm256_add_epi16(sum, product); }
  OCTAVO_INLINE __m256 finish(__m256i sum) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))); }
  OCTAVO_INLINE __m256 value(__m256 dot, __m256, const float* scales, int, int half, float row_sum) {
    const __m256 offset = _mm256_mul_ps(_mm256_set1_ps(row_sum), _mm256_loadu_ps(scales + 16 + 8 * half));
    return _mm256_fmadd_ps(dot, _mm256_loadu_ps(scales + 8 * half), offset);
  }
};

struct Q4K : Nibbles<WeightKind::q4_k> {
  static void load_scales(const uint8_t* block, int, float* to) {
    __m128i bytes[12];
    for (int b = 0; b < 12; ++b) bytes[b] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 64 + 16 * b));
    OCTAVO_UNROLL
    for (int j = 0; j < 8; ++j, to += kScales) {
      store_scaled(block, scale_of(bytes, j), 0.0f, to);
      store_scaled(block + 32, minimum_of(bytes, j), -0.0f, to + 16);
    }
  }

 private:
  // Twelve bytes hold eight 6-bit scales and minima: four of each in the low bits, the rest in halves and top bits.
  OCTAVO_INLINE __m128i scale_of(const __m128i* bytes, int j) {
    if (j < 4) return _mm_and_si128(bytes[j], _mm_set1_epi8(63));
    return _mm_or_si128(_mm_and_si128(bytes[j + 4], _mm_set1_epi8(15)),
                        _mm_and_si128(_mm_srli_epi16(bytes[j - 4], 2), _mm_set1_epi8(48)));
  }
  OCTAVO_INLINE __m128i minimum_of(const __m128i* bytes, int j) {
    if (j < 4) return _mm_and_si128(bytes[j + 4], _mm_set1_epi8(63));
    return _mm_or_si128(_mm_and_si128(_mm_srli_epi16(bytes[j + 4], 4), _mm_set1_epi8(15)),
                        _mm_and_si128(_mm_srli_epi16(bytes[j], 2), _mm_set1_epi8(48)));
  }
  // `halves` are 16 half floats, `sign` is 0 or -0.
  OCTAVO_INLINE void store_scaled(const uint8_t* halves, __m128i numbers, float sign, float* to) {
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(numbers));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(numbers, 8)));
    const __m256 flip = _mm256_set1_ps(sign);
    _mm256_storeu_ps(to, _mm256_xor_ps(flip, _mm256_mul_ps(load_half_floats(halves), low)));
    _mm256_storeu_ps(to + 8, _mm256_xor_ps(flip, _mm256_mul_ps(load_half_floats(halves + 16), high)));
  }
};

// Scales: [2 sub-blocks][16]. Sums start from the offsets in `QuantisedRows`, see the head of this file.
struct SixBits {
  static constexpr int kSteps = 8;
  static constexpr int kSubBlocks = 2;
  static constexpr int kScaleBytes = 36;
  static constexpr int kPackedBytes = 384;
  static constexpr int kScales = 32;

  static void load_scales(const uint8_t* block, int, float* to) {
    const __m256 d[2] = {load_half_floats(block), load_half_floats(block + 16)};
    for (int sub_block = 0; sub_block < 16; ++sub_block, to += 16) {
      const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 32 + 16 * sub_block));
      const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers));
      const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(numbers, 8)));
      _mm256_storeu_ps(to, _mm256_mul_ps(d[0], low));
      _mm256_storeu_ps(to + 8, _mm256_mul_ps(d[1], high));
    }
  }

  OCTAVO_INLINE __m256i weights(const uint8_t* group, int step, int half) {
    const __m256i pair = load_ints(group + 64 * (step % 4) + 32 * half);
    const __m256i low = _mm256_and_si256(step < 4 ? pair : _mm256_srli_epi16(pair, 4), _mm256_set1_epi8(15));
    const __m256i fields = load_ints(group + 256 + 64 * (step / 4) + 32 * half);
    const int f = step % 4;
    const __m256i high = f < 2 ? _mm256_slli_epi16(fields, 4 - 2 * f) : _mm256_srli_epi16(fields, 2 * f - 4);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(48)));
  }

  OCTAVO_INLINE __m256i multiply(__m256i weights, __m256i input) { return _mm256_maddubs_epi16(weights, input); }
  OCTAVO_INLINE __m256i add(__m256i sum, __m256i product) { return _mm256_add_epi16(sum, product); }
  OCTAVO_INLINE __m256 finish(__m256i sum) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))); }
  OCTAVO_INLINE __m256 value(__m256 dot, __m256 before, const float* scales, int sub_block, int half, float) {
    const __m256 scale = _mm256_loadu_ps(scales + 16 * sub_block + 8 * half);
    return sub_block == 0 ? _mm256_mul_ps(dot, scale) : _mm256_fmadd_ps(dot, scale, before);
  }
};

// Scales: [16].
struct Bytes {
  static constexpr int kSteps = 16;
  static constexpr int kSubBlocks = 1;
  static constexpr int kScaleBytes = 32;
  static constexpr int kPackedBytes = 512;
  static constexpr int kScales = 16;

  static void load_scales(const uint8_t* block, int num_groups, float* to) {
    for (int i = 0; i < 2 * num_groups; ++i) _mm256_storeu_ps(to + 8 * i, load_half_floats(block + 16 * i));
  }

  OCTAVO_INLINE __m256i weights(const uint8_t* group, int step, int half) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group + 32 * step + 16 * half)));
  }

  OCTAVO_INLINE __m256i multiply(__m256i weights, __m256i input) { return _mm256_madd_epi16(weights, input); }
  OCTAVO_INLINE __m256i add(__m256i sum, __m256i product) { return _mm256_add_epi32(sum, product); }
  OCTAVO_INLINE __m256 finish(__m256i sum) { return _mm256_cvtepi32_ps(sum); }
  OCTAVO_INLINE __m256 value(__m256 dot, __m256, const float* scales, int, int half, float) {
    return _mm256_mul_ps(dot, _mm256_loadu_ps(scales + 8 * half));
  }
};

template <class Format>
class GroupKernel {
 public:
  static constexpr int kMaxTileRows = kTileRows;
  static constexpr int kPackedRows = kTileRows;
  static constexpr int kPieceInputs = kChunkGroups * kGroupInputs;

  explicit GroupKernel(const PanelJob& job)
      : job_(job), unpacked_(job.scratch), scales_(reinterpret_cast<float*>(job.scratch + kUnpackedBytes)) {}

  void load(const uint8_t* panel, int64_t begin, int64_t end, bool unpack) {
    group_begin_ = begin / kGroupInputs;
    num_groups_ = static_cast<int>(end / kGroupInputs - group_begin_);
    const uint8_t* block = panel + group_begin_ * kGroupBytes;
    packed_block_ = block;
    for (int first = 0; first < num_groups_; first += 8) {
      const int count = num_groups_ - first < 8 ? num_groups_ - first : 8;
      Format::load_scales(block, count, scales_ + first * Format::kScales);
      const uint8_t* group = block + count * Format::kScaleBytes;
      if (unpack) unpack_groups(group, count, unpacked_ + first * kUnpackedGroupBytes);
      block = group + count * Format::kPackedBytes;
    }
    if (unpack) ahead_.start(block, num_groups_ * kGroupBytes, num_groups_);
  }

  void look_ahead(int index, int count) { ahead_.set_tile(index, count); }

  template <int kRows, bool kUnpacked>
  void tile(int row, float* out) const {
    const int64_t slot = row * (job_.num_inputs / kGroupInputs) + group_begin_ * kRows;
    const float* row_scales = job_.quantised.scales + 2 * slot;
    const int32_t* offsets = Format::kSubBlocks == 1 ? nullptr : job_.quantised.offsets + 2 * slot;
    const uint8_t* input = Format::kSteps == 16 ? reinterpret_cast<const uint8_t*>(job_.quantised.words + 32 * slot)
                                                : reinterpret_cast<const uint8_t*>(job_.quantised.bytes + 32 * slot);
    const uint8_t* weights = kUnpacked ? unpacked_ : packed_block_ + num_groups_ * Format::kScaleBytes;
    const uint8_t* ahead = packed_block_ + kPrefetchBytes;
    const float* scales = scales_;
    __m256 total[kRows][2];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      total[r][0] = _mm256_loadu_ps(out + 16 * r);
      total[r][1] = _mm256_loadu_ps(out + 16 * r + 8);
    }
    for (int group = 0; group < num_groups_; ++group) {
      __m256 value[kRows][2];
      OCTAVO_UNROLL
      for (int sub_block = 0; sub_block < Format::kSubBlocks; ++sub_block) {
        add_sub_block<kRows, kUnpacked>(sub_block, weights, input, offsets, scales, row_scales + kRows, value);
      }
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m256 row_scale = _mm256_broadcast_ss(row_scales + r);
        total[r][0] = _mm256_fmadd_ps(value[r][0], row_scale, total[r][0]);
        total[r][1] = _mm256_fmadd_ps(value[r][1], row_scale, total[r][1]);
      }
      if constexpr (kUnpacked) {
        ahead_.fetch(group);
      } else {
        OCTAVO_UNROLL
        for (int byte = 0; byte < kGroupBytes; byte += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(ahead + byte), _MM_HINT_T0);
        }
        ahead += kGroupBytes;
      }
      weights += kUnpacked ? kUnpackedGroupBytes : Format::kPackedBytes;
      input += 4 * Format::kSteps * kRows;
      row_scales += 2 * kRows;
      if constexpr (Format::kSubBlocks > 1) offsets += 2 * kRows;
      scales += Format::kScales;
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(out + 16 * r, total[r][0]);
      _mm256_storeu_ps(out + 16 * r + 8, total[r][1]);
    }
  }

 private:
  static constexpr int kGroupBytes = Format::kScaleBytes + Format::kPackedBytes;
  static constexpr int kUnpackedGroupBytes = 64 * Format::kSteps;

  template <int kRows, bool kUnpacked>
  OCTAVO_INLINE void add_sub_block(int sub_block, const uint8_t* weights, const uint8_t* input, const int32_t* offsets,
                                   const float* scales, const float* row_sums, __m256 (&value)[kRows][2]) {
    constexpr int kSteps = Format::kSteps / Format::kSubBlocks;
    __m256i sum[kRows][2];
    OCTAVO_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const int step = sub_block * kSteps + i;
      const __m256i left = kUnpacked ? load_ints(weights + 64 * step) : Format::weights(weights, step, 0);
      const __m256i right = kUnpacked ? load_ints(weights + 64 * step + 32) : Format::weights(weights, step, 1);
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m256i a = splat_word(input + (step * kRows + r) * 4);
        const __m256i products[2] = {Format::multiply(left, a), Format::multiply(right, a)};
        OCTAVO_UNROLL
        for (int half = 0; half < 2; ++half) {
          if (i > 0) {
            sum[r][half] = Format::add(sum[r][half], products[half]);
          } else if (Format::kSubBlocks > 1) {
            sum[r][half] = Format::add(_mm256_set1_epi32(offsets[2 * r + sub_block]), products[half]);
          } else {
            sum[r][half] = products[half];
          }
          keep_order(sum[r][half]);
        }
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      OCTAVO_UNROLL
      for (int half = 0; half < 2; ++half) {
        value[r][half] =
            Format::value(Format::finish(sum[r][half]), value[r][half], scales, sub_block, half, row_sums[r]);
      }
    }
  }

  static void unpack_groups(const uint8_t* group, int count, uint8_t* unpacked) {
    auto* to = reinterpret_cast<__m256i*>(unpacked);
    for (int i = 0; i < count; ++i, group += Format::kPackedBytes, to += 2 * Format::kSteps) {
      OCTAVO_UNROLL
      for (int step = 0; step < Format::kSteps; ++step) {
        _mm256_store_si256(to + 2 * step, Format::weights(group, step, 0));
        _mm256_store_si256(to + 2 * step + 1, Format::weights(group, step, 1));
      }
    }
  }

  const PanelJob& job_;
  uint8_t* const unpacked_;  // [group][step][2 halves][32 bytes]
  float* const scales_;      // [group][Format::kScales]
  const uint8_t* packed_block_ = nullptr;
  LookAhead ahead_;
  int64_t group_begin_ = 0;
  int num_groups_ = 0;
};

// --- activations -----------------------------------------------------------------------------------------------------

struct QuantisedGroup {
  __m256i bytes;
  float scale;
  float sum;
  int32_t offsets[2];
};

OCTAVO_INLINE QuantisedGroup quantise_group(const float* x) {
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7fffffff);
  __m256 values[4];
  __m256i greatest = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    values[i] = _mm256_loadu_ps(x + 8 * i);
    // As integers, magnitudes are ordered like the floats, and NaN is above everything: it cannot get lost in a
    // maximum.
    greatest = _mm256_max_epi32(greatest, _mm256_and_si256(_mm256_castps_si256(values[i]), magnitude_bits));
  }
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(greatest), _mm256_extracti128_si256(greatest, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
  const GroupScale scale = group_scale(_mm_cvtsi128_si32(top));

  const __m256 inverse = _mm256_set1_ps(scale.inverse);
  __m256i ints[4];
  for (int i = 0; i < 4; ++i) ints[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(ints[0], ints[1]), _mm256_packs_epi32(ints[2], ints[3]));
  QuantisedGroup group;
  group.bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if (!scale.is_finite) group.bytes = _mm256_setzero_si256();
  group.scale = scale.scale;

  // Sums over the quads of each sub-block (a 128-bit half) of inputs 0, 1 and of inputs 2, 3, repeated in every quad.
  __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), group.bytes);
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xb1));
  const __m256i offsets = _mm256_slli_epi16(_mm256_sub_epi16(_mm256_setzero_si256(), sums), 5);
  group.offsets[0] = _mm256_cvtsi256_si32(offsets);
  group.offsets[1] = _mm256_extract_epi32(offsets, 4);
  const __m256i halves = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  group.sum = static_cast<float>(_mm256_cvtsi256_si32(halves) + _mm256_extract_epi32(halves, 4));
  return group;
}

void quantise_rows(const float* x, int64_t x_stride, int64_t num_inputs, int row_begin, int row_end,
                   const QuantisedRows& to) {
  const int64_t num_groups = num_inputs / kGroupInputs;
  for (int first = row_begin; first < row_end; first += kTileRows) {
    const int num_rows = row_end - first < kTileRows ? row_end - first : kTileRows;
    for (int r = 0; r < num_rows; ++r) {
      for (int64_t group = 0; group < num_groups; ++group) {
        const QuantisedGroup quantised = quantise_group(x + (first + r) * x_stride + group * kGroupInputs);
        const int64_t slot = first * num_groups + group * num_rows;
        to.scales[2 * slot + r] = quantised.scale;
        to.scales[2 * slot + num_rows + r] = quantised.sum;
        alignas(32) int32_t quads[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(quads), quantised.bytes);
        if (to.bytes != nullptr) {
          int8_t* bytes = to.bytes + slot * kGroupInputs + 4 * r;
          for (int quad = 0; quad < 8; ++quad) std::memcpy(bytes + 4 * quad * num_rows, quads + quad, 4);
        }
        if (to.offsets != nullptr) std::memcpy(to.offsets + 2 * (slot + r), quantised.offsets, 8);
        if (to.words != nullptr) {
          alignas(32) int32_t pairs[16];
          const __m128i low = _mm256_castsi256_si128(quantised.bytes);
          const __m128i high = _mm256_extracti128_si256(quantised.bytes, 1);
          _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), _mm256_cvtepi8_epi16(low));
          _mm256_store_si256(reinterpret_cast<__m256i*>(pairs + 8), _mm256_cvtepi8_epi16(high));
          int16_t* words = to.words + slot * kGroupInputs + 2 * r;
          for (int pair = 0; pair < 16; ++pair) std::memcpy(words + 2 * pair * num_rows, pairs + pair, 4);
        }
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
      return run_panels_of<GroupKernel<Bytes>>(job);
    case WeightKind::q4_0:
      return run_panels_of<GroupKernel<Nibbles<WeightKind::q4_0>>>(job);
    case WeightKind::q4_1:
      return run_panels_of<GroupKernel<Nibbles<WeightKind::q4_1>>>(job);
    case WeightKind::q4_k:
      return run_panels_of<GroupKernel<Q4K>>(job);
    case WeightKind::q6_k:
      return run_panels_of<GroupKernel<SixBits>>(job);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_SIMD

namespace octavo {

const LinearKernels kAvx2LinearKernels = {OCTAVO_SIMD::quantise_rows, OCTAVO_SIMD::run_panels, true, "avx2"};

}  // namespace octavo
