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

struct MaxInts {
  OCTAVO_INLINE __m256i of(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  OCTAVO_INLINE __m128i of(__m128i a, __m128i b) { return _mm_max_epi32(a, b); }
};

struct SumInts {
  OCTAVO_INLINE __m256i of(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  OCTAVO_INLINE __m128i of(__m128i a, __m128i b) { return _mm_add_epi32(a, b); }
};

// Reduces each of four vectors of eight numbers to one.
template <class Operation>
OCTAVO_INLINE __m128i reduce(const __m256i (&v)[4]) {
  const __m256i pairs01 = Operation::of(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
  const __m256i pairs23 = Operation::of(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
  const __m256i halves =
      Operation::of(_mm256_unpacklo_epi64(pairs01, pairs23), _mm256_unpackhi_epi64(pairs01, pairs23));
  return Operation::of(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

struct RowScales {
  __m128 scale;
  __m128 inverse;
};

// Scales of four rows from the bits of their greatest magnitudes; see quant_rows.h.
OCTAVO_INLINE RowScales scales_of(__m128i greatest_bits) {
  const __m128 is_finite = _mm_castsi128_ps(_mm_cmplt_epi32(greatest_bits, _mm_set1_epi32(kInfinityBits)));
  const __m128 is_tiny = _mm_castsi128_ps(_mm_cmplt_epi32(greatest_bits, _mm_set1_epi32(kTinyBits)));
  const __m128 is_used = _mm_andnot_ps(is_tiny, is_finite);
  const __m128 greatest = _mm_blendv_ps(_mm_set1_ps(1.0f), _mm_castsi128_ps(greatest_bits), is_used);
  const __m128 scale = _mm_and_ps(is_used, _mm_div_ps(greatest, _mm_set1_ps(127.0f)));
  const __m128 inverse = _mm_and_ps(is_used, _mm_div_ps(_mm_set1_ps(127.0f), greatest));
  return {_mm_blendv_ps(_mm_castsi128_ps(_mm_set1_epi32(kNanBits)), scale, is_finite), inverse};
}

// Writes 8 units of 4 bytes of each row so that the units of all rows lie side by side: [8][kRows].
template <int kRows>
OCTAVO_INLINE void store_units(const __m256i (&rows)[4], void* at) {
  auto* to = static_cast<uint8_t*>(at);
  if constexpr (kRows == 1) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rows[0]);
  } else if constexpr (kRows == 4) {
    const __m256i low01 = _mm256_unpacklo_epi32(rows[0], rows[1]);
    const __m256i high01 = _mm256_unpackhi_epi32(rows[0], rows[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(rows[2], rows[3]);
    const __m256i high23 = _mm256_unpackhi_epi32(rows[2], rows[3]);
    const __m256i units[4] = {_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
                              _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)};
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i), _mm256_castsi256_si128(units[i]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i + 64), _mm256_extracti128_si256(units[i], 1));
    }
  } else {
    alignas(32) int32_t units[8];
    for (int r = 0; r < kRows; ++r) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(units), rows[r]);
      for (int i = 0; i < 8; ++i) std::memcpy(to + 4 * (i * kRows + r), units + i, 4);
    }
  }
}

OCTAVO_INLINE __m256i widen(__m256i bytes, int half) {
  return _mm256_cvtepi8_epi16(half == 0 ? _mm256_castsi256_si128(bytes) : _mm256_extracti128_si256(bytes, 1));
}

// The first `count` of four numbers.
OCTAVO_INLINE void store_some(float* to, __m128 values, int count) {
  alignas(16) float all[4];
  _mm_store_ps(all, values);
  std::memcpy(to, all, static_cast<size_t>(count) * sizeof(float));
}

// One group of `kRows` rows that make a tile; `x` is the group of the first row, `slot` its place in the results.
template <int kRows>
OCTAVO_INLINE void quantise_group(const float* x, int64_t x_stride, int64_t slot, const QuantisedRows& to) {
  __m256 values[kRows][4];
  __m256i greatest[4] = {};
  OCTAVO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    OCTAVO_UNROLL
    for (int i = 0; i < 4; ++i) {
      values[r][i] = _mm256_loadu_ps(x + r * x_stride + 8 * i);
      // As integers, magnitudes are ordered like the floats, and NaN is above everything: it cannot get lost.
      const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(values[r][i]), _mm256_set1_epi32(0x7fffffff));
      greatest[r] = _mm256_max_epi32(greatest[r], magnitude);
    }
  }
  const RowScales scales = scales_of(reduce<MaxInts>(greatest));
  alignas(16) float inverses[4];
  _mm_store_ps(inverses, scales.inverse);

  __m256i bytes[4] = {};
  __m256i sums[4] = {};
  OCTAVO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const __m256 inverse = _mm256_set1_ps(inverses[r]);
    __m256i ints[4];
    for (int i = 0; i < 4; ++i) ints[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[r][i], inverse));
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(ints[0], ints[1]), _mm256_packs_epi32(ints[2], ints[3]));
    bytes[r] = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes[r]);
    sums[r] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    if (to.offsets == nullptr) continue;
    // Sums over the quads of each sub-block (a 128-bit half) of inputs 0, 1 and of inputs 2, 3, repeated in every quad.
    __m256i both = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    both = _mm256_add_epi16(both, _mm256_shuffle_epi32(both, 0xb1));
    both = _mm256_slli_epi16(_mm256_sub_epi16(_mm256_setzero_si256(), both), 5);
    to.offsets[2 * (slot + r)] = _mm256_cvtsi256_si32(both);
    to.offsets[2 * (slot + r) + 1] = _mm256_extract_epi32(both, 4);
  }
  store_some(to.scales + 2 * slot, scales.scale, kRows);
  store_some(to.scales + 2 * slot + kRows, _mm_cvtepi32_ps(reduce<SumInts>(sums)), kRows);
  if (to.bytes != nullptr) store_units<kRows>(bytes, to.bytes + slot * kGroupInputs);
  if (to.words == nullptr) return;
  for (int half = 0; half < 2; ++half) {
    __m256i words[4];
    for (int r = 0; r < 4; ++r) words[r] = widen(bytes[r], half);
    store_units<kRows>(words, to.words + slot * kGroupInputs + 16 * kRows * half);
  }
}

template <int kRows>
void quantise_tile(const float* x, int64_t x_stride, int64_t num_inputs, int64_t slot, const QuantisedRows& to) {
  for (int64_t k = 0; k < num_inputs; k += kGroupInputs, slot += kRows) {
    quantise_group<kRows>(x + k, x_stride, slot, to);
  }
}

void quantise_rows(const float* x, int64_t x_stride, int64_t num_inputs, int row_begin, int row_end,
                   const QuantisedRows& to) {
  for (int row = row_begin; row < row_end; row += kTileRows) {
    const float* rows = x + row * x_stride;
    const int64_t slot = row * (num_inputs / kGroupInputs);
    switch (row_end - row) {
      case 1:
        quantise_tile<1>(rows, x_stride, num_inputs, slot, to);
        break;
      case 2:
        quantise_tile<2>(rows, x_stride, num_inputs, slot, to);
        break;
      case 3:
        quantise_tile<3>(rows, x_stride, num_inputs, slot, to);
        break;
      default:
        quantise_tile<4>(rows, x_stride, num_inputs, slot, to);
        break;
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
