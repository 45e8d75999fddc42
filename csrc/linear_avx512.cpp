// Products with AVX-512 and its dot products of bytes (VNNI): the same bits as the AVX2 kernels, in half the time.
//
// Integers are exact however they are summed, and the float32 part is the same sequence of operations per number, on
// 16 outputs at once. `vpdpbusd` multiplies unsigned weights by signed activations and sums four products in 32 bits.
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers start masked intrinsics from an undefined vector, and GCC then warns about it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "linear_kernels.h"
#include "linear_loop.h"

namespace octavo::OCTAVO_SIMD {
namespace {

constexpr int kPrefetchBytes = 4096;

OCTAVO_INLINE __m512i load_ints(const void* at) { return _mm512_loadu_si512(at); }

OCTAVO_INLINE __m512i splat_word(const void* at) {
  int32_t word;
  std::memcpy(&word, at, sizeof word);
  return _mm512_set1_epi32(word);
}

OCTAVO_INLINE __m512 load_half_floats(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

OCTAVO_INLINE __m512 floats_of_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

OCTAVO_INLINE __m128i load_bytes(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

// A format says how a group of 32 inputs x 16 outputs is held and multiplied:
//   kScaleBytes, kPackedBytes, kScales    bytes of scales and weights, and scale floats, of a group
//   load_scales(block, num_groups, to)    scales of a block of up to 8 groups, as floats
//   weights(group, quad)                  unsigned bytes [16 outputs][4 inputs], inputs 4 * quad ...
//   kSubBlocks, value(...)                what a group adds, in units of the row's scale; `dots` are sums of products

template <WeightKind kKind>
struct Nibbles {
  static constexpr int kSubBlocks = 1;
  static constexpr int kScaleBytes = kKind == WeightKind::q4_1 ? 64 : 32;
  static constexpr int kPackedBytes = 256;
  static constexpr int kScales = 32;

  static void load_scales(const uint8_t* block, int num_groups, float* to) {
    for (int i = 0; i < num_groups; ++i, block += kScaleBytes, to += kScales) {
      const __m512 scale = load_half_floats(block);
      _mm512_storeu_ps(to, scale);
      // q4_0 is scale * (q - 8)
      _mm512_storeu_ps(to + 16, kKind == WeightKind::q4_1 ? load_half_floats(block + 32)
                                                          : _mm512_mul_ps(scale, _mm512_set1_ps(-8.0f)));
    }
  }

  OCTAVO_INLINE __m512i weights(const uint8_t* group, int quad) {
    const __m512i pair = load_ints(group + 64 * (quad % 4));
    return _mm512_and_si512(quad < 4 ? pair : _mm512_srli_epi16(pair, 4), _mm512_set1_epi8(15));
  }

  OCTAVO_INLINE __m512 value(const __m512i* dots, const float* scales, const float* row_sum) {
    const __m512 offset = _mm512_mul_ps(_mm512_set1_ps(*row_sum), _mm512_loadu_ps(scales + 16));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[0]), _mm512_loadu_ps(scales), offset);
  }
};

struct Q4K : Nibbles<WeightKind::q4_k> {
  static void load_scales(const uint8_t* block, int, float* to) {
    const __m512 d = load_half_floats(block);
    const __m512 d_min = load_half_floats(block + 32);
    const __m512 sign = _mm512_set1_ps(-0.0f);
    const uint8_t* bytes = block + 64;
    for (int j = 0; j < 8; ++j, to += kScales) {
      const __m512 minimum = _mm512_mul_ps(d_min, floats_of_bytes(minimum_of(bytes, j)));
      _mm512_storeu_ps(to, _mm512_mul_ps(d, floats_of_bytes(scale_of(bytes, j))));
      _mm512_storeu_ps(to + 16, _mm512_xor_ps(sign, minimum));
    }
  }

 private:
  // Twelve bytes hold eight 6-bit scales and minima: four of each in the low bits, the rest in halves and top bits.
  OCTAVO_INLINE __m128i scale_of(const uint8_t* bytes, int j) {
    if (j < 4) return _mm_and_si128(load_bytes(bytes + 16 * j), _mm_set1_epi8(63));
    const __m128i low = _mm_and_si128(load_bytes(bytes + 16 * (j + 4)), _mm_set1_epi8(15));
    return _mm_or_si128(low, _mm_and_si128(_mm_srli_epi16(load_bytes(bytes + 16 * (j - 4)), 2), _mm_set1_epi8(48)));
  }
  OCTAVO_INLINE __m128i minimum_of(const uint8_t* bytes, int j) {
    if (j < 4) return _mm_and_si128(load_bytes(bytes + 16 * (j + 4)), _mm_set1_epi8(63));
    const __m128i low = _mm_and_si128(_mm_srli_epi16(load_bytes(bytes + 16 * (j + 4)), 4), _mm_set1_epi8(15));
    return _mm_or_si128(low, _mm_and_si128(_mm_srli_epi16(load_bytes(bytes + 16 * j), 2), _mm_set1_epi8(48)));
  }
};

// Sums start from the offsets in `QuantisedRows`, so that they are sums of (q - 32) * a.
struct SixBits {
  static constexpr int kSubBlocks = 2;
  static constexpr int kScaleBytes = 36;
  static constexpr int kPackedBytes = 384;
  static constexpr int kScales = 32;

  static void load_scales(const uint8_t* block, int, float* to) {
    const __m512 d = load_half_floats(block);
    for (int sub_block = 0; sub_block < 16; ++sub_block, to += 16) {
      const __m512i numbers = _mm512_cvtepi8_epi32(load_bytes(block + 32 + 16 * sub_block));
      _mm512_storeu_ps(to, _mm512_mul_ps(d, _mm512_cvtepi32_ps(numbers)));
    }
  }

  OCTAVO_INLINE __m512i weights(const uint8_t* group, int quad) {
    const __m512i pair = load_ints(group + 64 * (quad % 4));
    const __m512i low = _mm512_and_si512(quad < 4 ? pair : _mm512_srli_epi16(pair, 4), _mm512_set1_epi8(15));
    const __m512i fields = load_ints(group + 256 + 64 * (quad / 4));
    const int f = quad % 4;
    const __m512i high = f < 2 ? _mm512_slli_epi16(fields, 4 - 2 * f) : _mm512_srli_epi16(fields, 2 * f - 4);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(48)));
  }

  OCTAVO_INLINE __m512 value(const __m512i* dots, const float* scales, const float*) {
    const __m512 first = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[0]), _mm512_loadu_ps(scales));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[1]), _mm512_loadu_ps(scales + 16), first);
  }
};

// Weights are made unsigned by adding 128, which adds 128 * sum(a) to a sum of products: whole numbers below 2^24, so
// taking it off again in float32 is exact.
struct Bytes {
  static constexpr int kSubBlocks = 1;
  static constexpr int kScaleBytes = 32;
  static constexpr int kPackedBytes = 512;
  static constexpr int kScales = 16;

  static void load_scales(const uint8_t* block, int num_groups, float* to) {
    for (int i = 0; i < num_groups; ++i) _mm512_storeu_ps(to + 16 * i, load_half_floats(block + 32 * i));
  }

  // Two rows of [16 outputs][2 inputs] become one of [16 outputs][4 inputs].
  OCTAVO_INLINE __m512i weights(const uint8_t* group, int quad) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i quads = _mm512_permutexvar_epi16(order, load_ints(group + 64 * quad));
    return _mm512_xor_si512(quads, _mm512_set1_epi8(static_cast<char>(0x80)));
  }

  OCTAVO_INLINE __m512 value(const __m512i* dots, const float* scales, const float* row_sum) {
    const __m512 dot = _mm512_fnmadd_ps(_mm512_set1_ps(*row_sum), _mm512_set1_ps(128.0f), _mm512_cvtepi32_ps(dots[0]));
    return _mm512_mul_ps(dot, _mm512_loadu_ps(scales));
  }
};

template <class Format>
class GroupKernel {
 public:
  static constexpr int kMaxTileRows = 2 * kTileRows;  // two tiles of quantised rows
  static constexpr int kPackedRows = kMaxTileRows;
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
    constexpr int kFirst = kRows < kTileRows ? kRows : kTileRows;  // rows in the first of two tiles
    const int64_t num_groups = job_.num_inputs / kGroupInputs;
    const int64_t slots[2] = {row * num_groups + group_begin_ * kFirst,
                              (row + kTileRows) * num_groups + group_begin_ * (kRows - kFirst)};
    const int8_t* bytes[2] = {job_.quantised.bytes + 32 * slots[0], job_.quantised.bytes + 32 * slots[1]};
    const float* row_scales[2] = {job_.quantised.scales + 2 * slots[0], job_.quantised.scales + 2 * slots[1]};
    const int32_t* offsets[2] = {};
    if constexpr (Format::kSubBlocks > 1) {
      for (int half = 0; half < 2; ++half) offsets[half] = job_.quantised.offsets + 2 * slots[half];
    }
    const uint8_t* weights = kUnpacked ? unpacked_ : packed_block_ + num_groups_ * Format::kScaleBytes;
    const uint8_t* ahead = packed_block_ + kPrefetchBytes;
    const float* scales = scales_;
    __m512 total[kRows];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_loadu_ps(out + 16 * r);
    for (int group = 0; group < num_groups_; ++group) {
      __m512i dots[kRows][Format::kSubBlocks];
      start_sums<kRows>(offsets, dots);
      OCTAVO_UNROLL
      for (int quad = 0; quad < 8; ++quad) {
        const __m512i w = kUnpacked ? load_ints(weights + 64 * quad) : Format::weights(weights, quad);
        OCTAVO_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const int half = r / kTileRows;
          const int stride = half == 0 ? kFirst : kRows - kFirst;
          __m512i& dot = dots[r][quad * Format::kSubBlocks / 8];
          dot = _mm512_dpbusd_epi32(dot, w, splat_word(bytes[half] + (quad * stride + r % kTileRows) * 4));
        }
      }
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int half = r / kTileRows;
        const int stride = half == 0 ? kFirst : kRows - kFirst;
        const float* row_scale = row_scales[half] + r % kTileRows;
        const __m512 value = Format::value(dots[r], scales, row_scale + stride);
        total[r] = _mm512_fmadd_ps(value, _mm512_set1_ps(*row_scale), total[r]);
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
      scales += Format::kScales;
      for (int half = 0; half < 2; ++half) {
        const int stride = half == 0 ? kFirst : kRows - kFirst;
        bytes[half] += 32 * stride;
        row_scales[half] += 2 * stride;
        if constexpr (Format::kSubBlocks > 1) offsets[half] += 2 * stride;
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(out + 16 * r, total[r]);
  }

 private:
  static constexpr int kGroupBytes = Format::kScaleBytes + Format::kPackedBytes;
  static constexpr int kUnpackedGroupBytes = 512;

  template <int kRows>
  OCTAVO_INLINE void start_sums(const int32_t* const (&offsets)[2], __m512i (&dots)[kRows][Format::kSubBlocks]) {
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      OCTAVO_UNROLL
      for (int s = 0; s < Format::kSubBlocks; ++s) {
        dots[r][s] = _mm512_setzero_si512();
        if (Format::kSubBlocks == 1) continue;
        const __m512i pair = splat_word(offsets[r / kTileRows] + 2 * (r % kTileRows) + s);
        dots[r][s] = _mm512_dpwssd_epi32(dots[r][s], _mm512_set1_epi16(1), pair);
      }
    }
  }

  static void unpack_groups(const uint8_t* group, int count, uint8_t* to) {
    for (int i = 0; i < count; ++i, group += Format::kPackedBytes, to += kUnpackedGroupBytes) {
      OCTAVO_UNROLL
      for (int quad = 0; quad < 8; ++quad) _mm512_store_si512(to + 64 * quad, Format::weights(group, quad));
    }
  }

  const PanelJob& job_;
  uint8_t* const unpacked_;  // [group][quad][16 outputs][4]
  float* const scales_;      // [group][Format::kScales]
  const uint8_t* packed_block_ = nullptr;
  LookAhead ahead_;
  int64_t group_begin_ = 0;
  int num_groups_ = 0;
};

template <WeightKind kKind>
class FloatKernel {
 public:
  static constexpr int kMaxTileRows = 12;
  static constexpr int kPackedRows = kKind == WeightKind::f32 ? 1 << 30 : kMaxTileRows;
  static constexpr int kPieceInputs = kPackedInputs;

  explicit FloatKernel(const PanelJob& job) : job_(job) {}

  void load(const uint8_t* panel, int64_t begin, int64_t end, bool unpack) {
    begin_ = begin;
    count_ = static_cast<int>(end - begin);
    packed_ = panel + begin * kInputBytes;
    ahead_.start(panel + end * kInputBytes, count_ * kInputBytes, (count_ + 1) / 2);
    if (!unpack) return;
    unpacked_ = reinterpret_cast<float*>(job_.scratch);
    for (int k = 0; k < count_; ++k) _mm512_store_ps(unpacked_ + 16 * k, packed_weights(k));
  }

  void look_ahead(int index, int count) { ahead_.set_tile(index, count); }

  template <int kRows, bool kUnpacked>
  void tile(int row, float* out) const {
    // One pointer serves three rows, by way of index registers: twelve pointers would not fit into registers.
    const int64_t stride = job_.x_stride;
    const float* x[kRows];
    __m512 total[kRows];
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (r % 3 == 0) x[r] = job_.x + (row + r) * stride + begin_;
      total[r] = _mm512_loadu_ps(out + 16 * r);
    }
    int k = 0;
    for (; k + 1 < count_; k += 2) {
      ahead_.fetch(k / 2);
      add_input<kRows, kUnpacked>(k, 0, x, stride, total);
      add_input<kRows, kUnpacked>(k + 1, 1, x, stride, total);
      OCTAVO_UNROLL
      for (int r = 0; r < kRows; r += 3) x[r] += 2;
    }
    if (k < count_) add_input<kRows, kUnpacked>(k, 0, x, stride, total);
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(out + 16 * r, total[r]);
  }

 private:
  static constexpr int kInputBytes = kKind == WeightKind::f32 ? 64 : 32;  // of one input in a panel

  // Adds the products of input `k`, which lies `ahead` of the pointers.
  template <int kRows, bool kUnpacked>
  __attribute__((always_inline)) void add_input(int k, int ahead, const float* const (&x)[kRows], int64_t stride,
                                                __m512 (&total)[kRows]) const {
    const __m512 w = kUnpacked ? _mm512_load_ps(unpacked_ + 16 * k) : packed_weights(k);
    OCTAVO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float* input = x[r - r % 3] + r % 3 * stride + ahead;
      total[r] = _mm512_fmadd_ps(_mm512_set1_ps(*input), w, total[r]);
    }
  }

  __attribute__((always_inline)) __m512 packed_weights(int k) const {
    const uint8_t* at = packed_ + k * kInputBytes;
    if constexpr (kKind == WeightKind::f32) return _mm512_loadu_ps(at);
    if constexpr (kKind == WeightKind::f16) return load_half_floats(at);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  const PanelJob& job_;
  const uint8_t* packed_ = nullptr;
  float* unpacked_ = nullptr;
  LookAhead ahead_;
  int64_t begin_ = 0;
  int count_ = 0;
};

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

const RunPanels kAvx512RunPanels = OCTAVO_SIMD::run_panels;

}  // namespace octavo
