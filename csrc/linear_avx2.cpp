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

constexpr int kPrefetchBytes = 1024;

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

// Bytes 0..15 as two vectors of floats.
OCTAVO_INLINE void floats_of_bytes(__m128i bytes, __m256* low, __m256* high) {
  *low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  *high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
}

// --- 4 bits ----------------------------------------------------------------------------------------------------------

// A weight is scale * q + minimum, so that a group adds s * (scale * sum(q * a) + minimum * sum(a)).
// Scale and minimum of a group, [16] each, as floats. All products here are exact in float32.
template <WeightKind kKind>
void nibble_scales(const uint8_t* panel, int64_t group_begin, int num_groups, float* scales) {
  if constexpr (kKind == WeightKind::q4_k) {
    const uint8_t* block = panel + group_begin / 8 * 256;
    for (int group = 0; group < num_groups; group += 8, block += 256) {
      const __m256 d[2] = {load_half_floats(block), load_half_floats(block + 16)};
      const __m256 d_min[2] = {load_half_floats(block + 32), load_half_floats(block + 48)};
      __m128i bytes[12];
      for (int i = 0; i < 12; ++i) bytes[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 64 + 16 * i));
      const __m128i low6 = _mm_set1_epi8(63);
      const __m128i low4 = _mm_set1_epi8(15);
      const __m128i top2 = _mm_set1_epi8(48);
      for (int j = 0; j < 8; ++j, scales += 32) {
        __m128i scale;
        __m128i minimum;
        if (j < 4) {
          scale = _mm_and_si128(bytes[j], low6);
          minimum = _mm_and_si128(bytes[j + 4], low6);
        } else {
          scale = _mm_or_si128(_mm_and_si128(bytes[j + 4], low4), _mm_and_si128(_mm_srli_epi16(bytes[j - 4], 2), top2));
          minimum = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(bytes[j + 4], 4), low4),
                                 _mm_and_si128(_mm_srli_epi16(bytes[j], 2), top2));
        }
        __m256 low;
        __m256 high;
        floats_of_bytes(scale, &low, &high);
        _mm256_storeu_ps(scales, _mm256_mul_ps(d[0], low));
        _mm256_storeu_ps(scales + 8, _mm256_mul_ps(d[1], high));
        floats_of_bytes(minimum, &low, &high);
        const __m256 zero = _mm256_setzero_ps();
        _mm256_storeu_ps(scales + 16, _mm256_sub_ps(zero, _mm256_mul_ps(d_min[0], low)));
        _mm256_storeu_ps(scales + 24, _mm256_sub_ps(zero, _mm256_mul_ps(d_min[1], high)));
      }
    }
    return;
  }
  constexpr int kScaleBytes = kKind == WeightKind::q4_1 ? 64 : 32;
  const uint8_t* at = panel + group_begin * kScaleBytes;
  for (int group = 0; group < num_groups; ++group, at += kScaleBytes, scales += 32) {
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = load_half_floats(at + 16 * half);
      // q4_0 is scale * (q - 8)
      const __m256 minimum = kKind == WeightKind::q4_1 ? load_half_floats(at + 32 + 16 * half)
                                                       : _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
      _mm256_storeu_ps(scales + 8 * half, scale);
      _mm256_storeu_ps(scales + 16 + 8 * half, minimum);
    }
  }
}

template <WeightKind kKind>
class NibbleKernel {
 public:
  static constexpr int kMaxTileRows = kTileRows;
  static constexpr int kPackedRows = kTileRows;
  static constexpr int kPieceInputs = kChunkGroups * kGroupInputs;

  explicit NibbleKernel(const PanelJob& job)
      : job_(job), unpacked_(job.scratch), scales_(reinterpret_cast<float*>(job.scratch + kUnpackedBytes)) {}

  void load(const uint8_t* panel, int64_t begin, int64_t end, bool unpack) {
    begin_ = begin;
    num_groups_ = static_cast<int>((end - begin) / kGroupInputs);
    nibble_scales<kKind>(panel, begin / kGroupInputs, num_groups_, scales_);
    packed_ = panel + job_.scale_bytes + begin / kGroupInputs * job_.group_bytes;
    if (!unpack) return;
    const __m256i low4 = _mm256_set1_epi8(15);
    for (int group = 0; group < num_groups_; ++group) {
      for (int i = 0; i < 8; ++i) {
        const __m256i pair = load_ints(packed_ + 256 * group + 32 * i);
        uint8_t* to = unpacked_ + 512 * group + 32 * i;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_and_si256(pair, low4));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 256), _mm256_and_si256(_mm256_srli_epi16(pair, 4), low4));
      }
    }
  }

  template <int kRows, bool kUnpacked>
  void tile(int row, float* out) const {
    const int8_t* bytes = job_.quantised.bytes + row * job_.num_inputs + begin_ * kRows;
    const float* row_scales = job_.quantised.scales + (row * job_.num_inputs + begin_ * kRows) / kGroupInputs * 2;
    const uint8_t* weights = kUnpacked ? unpacked_ : packed_;
    const float* scales = scales_;
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i low4 = _mm256_set1_epi8(15);
    __m256 total[kRows][2];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      total[r][0] = _mm256_loadu_ps(out + 16 * r);
      total[r][1] = _mm256_loadu_ps(out + 16 * r + 8);
    }
    for (int group = 0; group < num_groups_; ++group) {
      __m256i sum[kRows][2];
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
      const auto add = [&](int quad, __m256i left, __m256i right) __attribute__((always_inline)) {
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const __m256i input = splat_word(bytes + (quad * kRows + r) * 4);
          sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(left, input));
          sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(right, input));
          keep_order(sum[r][0]);
          keep_order(sum[r][1]);
        }
      };
      if constexpr (kUnpacked) {
        OCTAVO_UNROLL
        for (int quad = 0; quad < 8; ++quad)
          add(quad, load_ints(weights + 64 * quad), load_ints(weights + 64 * quad + 32));
        weights += 512;
      } else {
        OCTAVO_UNROLL
        for (int quad = 0; quad < 4; ++quad) {
          const __m256i left = load_ints(weights + 64 * quad);
          const __m256i right = load_ints(weights + 64 * quad + 32);
          add(quad, _mm256_and_si256(left, low4), _mm256_and_si256(right, low4));
          add(quad + 4, _mm256_and_si256(_mm256_srli_epi16(left, 4), low4),
              _mm256_and_si256(_mm256_srli_epi16(right, 4), low4));
          _mm_prefetch(reinterpret_cast<const char*>(weights + 64 * quad + kPrefetchBytes), _MM_HINT_T0);
        }
        weights += 256;
      }
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m256 row_scale = _mm256_broadcast_ss(row_scales + r);
        const __m256 row_sum = _mm256_broadcast_ss(row_scales + kRows + r);
        OCTAVO_UNROLL
        for (int half = 0; half < 2; ++half) {
          const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r][half], ones));
          const __m256 offset = _mm256_mul_ps(row_sum, _mm256_loadu_ps(scales + 16 + 8 * half));
          const __m256 value = _mm256_fmadd_ps(dot, _mm256_loadu_ps(scales + 8 * half), offset);
          total[r][half] = _mm256_fmadd_ps(value, row_scale, total[r][half]);
        }
      }
      bytes += 32 * kRows;
      row_scales += 2 * kRows;
      scales += 32;
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(out + 16 * r, total[r][0]);
      _mm256_storeu_ps(out + 16 * r + 8, total[r][1]);
    }
  }

 private:
  const PanelJob& job_;
  uint8_t* const unpacked_;  // [group][8 quads][16 outputs][4]
  float* const scales_;      // [group]([16] scale, [16] minimum)
  const uint8_t* packed_ = nullptr;
  int64_t begin_ = 0;
  int num_groups_ = 0;
};

// --- 6 bits ----------------------------------------------------------------------------------------------------------

class SixBitKernel {
 public:
  static constexpr int kMaxTileRows = kTileRows;
  static constexpr int kPackedRows = kTileRows;
  static constexpr int kPieceInputs = kChunkGroups * kGroupInputs;

  explicit SixBitKernel(const PanelJob& job)
      : job_(job), unpacked_(job.scratch), scales_(reinterpret_cast<float*>(job.scratch + kUnpackedBytes)) {}

  void load(const uint8_t* panel, int64_t begin, int64_t end, bool unpack) {
    begin_ = begin;
    num_groups_ = static_cast<int>((end - begin) / kGroupInputs);
    load_scales(panel + begin / kGroupInputs / 8 * 288);
    packed_ = panel + job_.scale_bytes + begin / kGroupInputs * job_.group_bytes;
    if (!unpack) return;
    for (int group = 0; group < num_groups_; ++group) {
      OCTAVO_UNROLL
      for (int quad = 0; quad < 8; ++quad) {
        for (int half = 0; half < 2; ++half) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(unpacked_ + 512 * group + 64 * quad + 32 * half),
                              weights_of(packed_ + 384 * group, quad, half));
        }
      }
    }
  }

  template <int kRows, bool kUnpacked>
  void tile(int row, float* out) const {
    const int64_t first_group = (row * job_.num_inputs + begin_ * kRows) / kGroupInputs;
    const int8_t* bytes = job_.quantised.bytes + first_group * kGroupInputs;
    const float* row_scales = job_.quantised.scales + first_group * 2;
    const int32_t* offsets = job_.quantised.offsets + first_group * 2;
    const uint8_t* weights = kUnpacked ? unpacked_ : packed_;
    const float* scales = scales_;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 total[kRows][2];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      total[r][0] = _mm256_loadu_ps(out + 16 * r);
      total[r][1] = _mm256_loadu_ps(out + 16 * r + 8);
    }
    for (int group = 0; group < num_groups_; ++group) {
      __m256 value[kRows][2];
      OCTAVO_UNROLL
      for (int sub_block = 0; sub_block < 2; ++sub_block) {
        __m256i sum[kRows][2];
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_set1_epi32(offsets[2 * r + sub_block]);
        OCTAVO_UNROLL
        for (int quad = 4 * sub_block; quad < 4 * sub_block + 4; ++quad) {
          const __m256i left = kUnpacked ? load_ints(weights + 64 * quad) : weights_of(weights, quad, 0);
          const __m256i right = kUnpacked ? load_ints(weights + 64 * quad + 32) : weights_of(weights, quad, 1);
          OCTAVO_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const __m256i input = splat_word(bytes + (quad * kRows + r) * 4);
            sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(left, input));
            sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(right, input));
            keep_order(sum[r][0]);
            keep_order(sum[r][1]);
          }
        }
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) {
          OCTAVO_UNROLL
          for (int half = 0; half < 2; ++half) {
            const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r][half], ones));
            const __m256 scale = _mm256_loadu_ps(scales + 16 * sub_block + 8 * half);
            value[r][half] = sub_block == 0 ? _mm256_mul_ps(dot, scale) : _mm256_fmadd_ps(dot, scale, value[r][half]);
          }
        }
      }
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m256 row_scale = _mm256_broadcast_ss(row_scales + r);
        total[r][0] = _mm256_fmadd_ps(value[r][0], row_scale, total[r][0]);
        total[r][1] = _mm256_fmadd_ps(value[r][1], row_scale, total[r][1]);
      }
      if constexpr (!kUnpacked) {
        for (int line = 0; line < 6; ++line) {
          _mm_prefetch(reinterpret_cast<const char*>(weights + 64 * line + kPrefetchBytes), _MM_HINT_T0);
        }
      }
      weights += kUnpacked ? 512 : 384;
      bytes += 32 * kRows;
      row_scales += 2 * kRows;
      offsets += 2 * kRows;
      scales += 32;
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(out + 16 * r, total[r][0]);
      _mm256_storeu_ps(out + 16 * r + 8, total[r][1]);
    }
  }

 private:
  // Weights of outputs 8 * half ... + 7, inputs 4 * quad ... + 3 of a packed group, as bytes 0..63.
  OCTAVO_INLINE __m256i weights_of(const uint8_t* group, int quad, int half) {
    const __m256i low4 = _mm256_set1_epi8(15);
    const __m256i two_bits = _mm256_set1_epi8(0x30);
    __m256i low = load_ints(group + 64 * (quad % 4) + 32 * half);
    if (quad >= 4) low = _mm256_srli_epi16(low, 4);
    __m256i high = load_ints(group + 256 + 64 * (quad / 4) + 32 * half);
    const int field = quad % 4;
    high = field < 2 ? _mm256_slli_epi16(high, 4 - 2 * field) : _mm256_srli_epi16(high, 2 * field - 4);
    return _mm256_or_si256(_mm256_and_si256(low, low4), _mm256_and_si256(high, two_bits));
  }

  void load_scales(const uint8_t* block) {
    float* scales = scales_;
    for (int group = 0; group < num_groups_; group += 8, block += 288) {
      const __m256 d[2] = {load_half_floats(block), load_half_floats(block + 16)};
      for (int sub_block = 0; sub_block < 16; ++sub_block, scales += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 32 + 16 * sub_block));
        const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
        _mm256_storeu_ps(scales, _mm256_mul_ps(d[0], low));
        _mm256_storeu_ps(scales + 8, _mm256_mul_ps(d[1], high));
      }
    }
  }

  const PanelJob& job_;
  uint8_t* const unpacked_;  // [group][8 quads][16 outputs][4]
  float* const scales_;      // [group][2 sub-blocks][16]
  const uint8_t* packed_ = nullptr;
  int64_t begin_ = 0;
  int num_groups_ = 0;
};

// --- 8 bits ----------------------------------------------------------------------------------------------------------

class Int8Kernel {
 public:
  static constexpr int kMaxTileRows = kTileRows;
  static constexpr int kPackedRows = kTileRows;
  static constexpr int kPieceInputs = kChunkGroups * kGroupInputs;

  explicit Int8Kernel(const PanelJob& job)
      : job_(job),
        unpacked_(reinterpret_cast<int16_t*>(job.scratch)),
        scales_(reinterpret_cast<float*>(job.scratch + kUnpackedBytes)) {}

  void load(const uint8_t* panel, int64_t begin, int64_t end, bool unpack) {
    begin_ = begin;
    num_groups_ = static_cast<int>((end - begin) / kGroupInputs);
    const uint8_t* at = panel + begin / kGroupInputs * 32;
    for (int i = 0; i < 2 * num_groups_; ++i) _mm256_storeu_ps(scales_ + 8 * i, load_half_floats(at + 16 * i));
    packed_ = panel + job_.scale_bytes + begin / kGroupInputs * job_.group_bytes;
    if (!unpack) return;
    for (int i = 0; i < 32 * num_groups_; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(unpacked_ + 16 * i), widen(packed_ + 16 * i));
    }
  }

  template <int kRows, bool kUnpacked>
  void tile(int row, float* out) const {
    const int64_t first_group = (row * job_.num_inputs + begin_ * kRows) / kGroupInputs;
    const int16_t* words = job_.quantised.words + first_group * kGroupInputs;
    const float* row_scales = job_.quantised.scales + first_group * 2;
    const uint8_t* packed = packed_;
    const int16_t* unpacked = unpacked_;
    const float* scales = scales_;
    __m256 total[kRows][2];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      total[r][0] = _mm256_loadu_ps(out + 16 * r);
      total[r][1] = _mm256_loadu_ps(out + 16 * r + 8);
    }
    for (int group = 0; group < num_groups_; ++group) {
      __m256i sum[kRows][2];
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
      OCTAVO_UNROLL
      for (int pair = 0; pair < 16; ++pair) {
        const __m256i left = kUnpacked ? load_ints(unpacked + 32 * pair) : widen(packed + 32 * pair);
        const __m256i right = kUnpacked ? load_ints(unpacked + 32 * pair + 16) : widen(packed + 32 * pair + 16);
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const __m256i input = splat_word(words + (pair * kRows + r) * 2);
          sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(left, input));
          sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(right, input));
          keep_order(sum[r][0]);
          keep_order(sum[r][1]);
        }
      }
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m256 row_scale = _mm256_broadcast_ss(row_scales + r);
        OCTAVO_UNROLL
        for (int half = 0; half < 2; ++half) {
          const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][half]), _mm256_loadu_ps(scales + 8 * half));
          total[r][half] = _mm256_fmadd_ps(value, row_scale, total[r][half]);
        }
      }
      if constexpr (!kUnpacked) {
        for (int line = 0; line < 8; ++line) {
          _mm_prefetch(reinterpret_cast<const char*>(packed + 64 * line + kPrefetchBytes), _MM_HINT_T0);
        }
      }
      packed += 512;
      unpacked += 512;
      words += 32 * kRows;
      row_scales += 2 * kRows;
      scales += 16;
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(out + 16 * r, total[r][0]);
      _mm256_storeu_ps(out + 16 * r + 8, total[r][1]);
    }
  }

 private:
  OCTAVO_INLINE __m256i widen(const uint8_t* at) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }

  const PanelJob& job_;
  int16_t* const unpacked_;  // [group][16 pairs][16 outputs][2]
  float* const scales_;      // [group][16]
  const uint8_t* packed_ = nullptr;
  int64_t begin_ = 0;
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
      return run_panels_of<Int8Kernel>(job);
    case WeightKind::q4_0:
      return run_panels_of<NibbleKernel<WeightKind::q4_0>>(job);
    case WeightKind::q4_1:
      return run_panels_of<NibbleKernel<WeightKind::q4_1>>(job);
    case WeightKind::q4_k:
      return run_panels_of<NibbleKernel<WeightKind::q4_k>>(job);
    case WeightKind::q6_k:
      return run_panels_of<SixBitKernel>(job);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_SIMD

namespace octavo {

const LinearKernels kAvx2LinearKernels = {OCTAVO_SIMD::quantise_rows, OCTAVO_SIMD::run_panels, true};

}  // namespace octavo
