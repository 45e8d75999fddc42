// Chooses kernels, and makes sure that a choice between them can never change a bit.
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "linear_kernels.h"
#include "linear_layout.h"
#include "linear_memory.h"

namespace octavo {
namespace {

#if OCTAVO_HAVE_AVX2 && OCTAVO_HAVE_AVX512

constexpr int64_t kInputs = 1024;  // more than one piece, however kernels cut the inputs
constexpr int64_t kOutputs = 29;   // a whole panel and a part of one
constexpr int64_t kPanels = 2;
constexpr int kMaxRows = 21;

// A small generator, so that the test needs no seed and is the same everywhere.
class Noise {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f; }  // [-1, 1)

 private:
  uint64_t state_ = 1;
};

// Random panels whose float and half-float numbers are below 2 in magnitude.
std::vector<uint8_t> random_panels(WeightKind kind, Noise& noise) {
  const PanelLayout layout = panel_layout(kind);
  const int64_t block_bytes = kBlockGroups * (layout.scale_bytes + layout.weight_bytes);
  const int64_t scale_bytes = is_quantised(kind) ? kBlockGroups * layout.scale_bytes : block_bytes;
  std::vector<uint8_t> panels(static_cast<size_t>(file_row_bytes(kind, kInputs) * kPanelOutputs * kPanels));
  const int64_t float_bytes = kind == WeightKind::f32 ? 4 : 2;
  for (size_t i = 0; i < panels.size(); ++i) {
    panels[i] = static_cast<uint8_t>(noise.next());
    const bool is_top_byte = static_cast<int64_t>(i) % float_bytes == float_bytes - 1;
    // Without its upper bit an exponent is below the bias, so the number is below 2.
    if (static_cast<int64_t>(i) % block_bytes < scale_bytes && is_top_byte) panels[i] &= 0xbf;
  }
  return panels;
}

struct TestRows {
  std::vector<float> x = std::vector<float>(kMaxRows * kInputs);
  std::vector<int8_t> bytes = std::vector<int8_t>(kMaxRows * kInputs);
  std::vector<int16_t> words = std::vector<int16_t>(kMaxRows * kInputs);
  std::vector<float> scales = std::vector<float>(kMaxRows * kInputs / kGroupInputs * 2);
  std::vector<int32_t> offsets = std::vector<int32_t>(kMaxRows * kInputs / kGroupInputs * 2);
};

bool same_bits(WeightKind kind, int num_rows, const std::vector<uint8_t>& panels, TestRows& rows, uint8_t* scratch) {
  const PanelLayout layout = panel_layout(kind);
  PanelJob job{};
  job.kind = kind;
  job.panels = panels.data();
  job.scale_bytes = layout.scale_bytes;
  job.weight_bytes = layout.weight_bytes;
  job.panel_bytes = file_row_bytes(kind, kInputs) * kPanelOutputs;
  job.panel_end = kPanels;
  job.num_inputs = kInputs;
  job.num_outputs = kOutputs;
  job.num_rows = num_rows;
  job.x = rows.x.data();
  job.x_stride = kInputs;
  job.quantised = {rows.bytes.data(), rows.words.data(), rows.scales.data(), rows.offsets.data()};
  job.out_stride = kOutputs;
  job.scratch = scratch;
  kAvx2LinearKernels.quantise_rows(job.x, kInputs, kInputs, 0, num_rows, job.quantised);

  std::vector<float> narrow(static_cast<size_t>(num_rows * kOutputs));
  std::vector<float> wide(narrow.size(), 1.0f);
  job.out = narrow.data();
  kAvx2LinearKernels.run_panels(job);
  job.out = wide.data();
  kAvx512RunPanels(job);
  return std::memcmp(narrow.data(), wide.data(), narrow.size() * sizeof(float)) == 0;
}

bool avx512_gives_the_same_bits() {
  Noise noise;
  TestRows rows;
  for (float& value : rows.x) value = noise.uniform();
  const auto scratch = weight_memory(kPanelScratchBytes + kMaxRows * kPanelOutputs * sizeof(float));
  for (int kind = 0; kind <= static_cast<int>(WeightKind::q6_k); ++kind) {
    const std::vector<uint8_t> panels = random_panels(static_cast<WeightKind>(kind), noise);
    for (const int num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, kMaxRows}) {
      if (!same_bits(static_cast<WeightKind>(kind), num_rows, panels, rows, scratch.get())) return false;
    }
  }
  return true;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// Null where this machine lacks AVX-512 or its kernels differ.
const LinearKernels* avx512_kernels() {
  static const LinearKernels kernels = {kAvx2LinearKernels.quantise_rows, kAvx512RunPanels, false, "avx512"};
  static const bool is_usable = has_avx512() && avx512_gives_the_same_bits();
  return is_usable ? &kernels : nullptr;
}

#else

const LinearKernels* avx512_kernels() { return nullptr; }

#endif

}  // namespace

const LinearKernels& choose_linear_kernels(Isa isa, bool may_widen) {
#if OCTAVO_HAVE_AVX2
  if (isa == Isa::avx2) {
    const LinearKernels* wider = may_widen ? avx512_kernels() : nullptr;
    return wider != nullptr ? *wider : kAvx2LinearKernels;
  }
#endif
  if (isa != Isa::portable) throw std::invalid_argument("linear: no kernels for this instruction set");
  (void)may_widen;
  return kPortableLinearKernels;
}

}  // namespace octavo
