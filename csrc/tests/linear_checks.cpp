// Drives packing and products without Python, for the sanitizers (scripts/sanitize.sh). What the numbers should be is
// tested in tests/runtime; here every kind, tile height and thread count runs, at ends of buffers that are just as long
// as they must be, and threads and tile heights must agree to the bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "aligned.h"
#include "linear.h"
#include "linear_layout.h"
#include "quant_weights.h"
#include "team.h"

namespace octavo {
namespace {

int num_checks = 0;

void check(bool is_right, const std::string& what) {
  ++num_checks;
  if (is_right) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

struct Kernels {
  Isa isa;
  bool may_widen;
};

std::vector<Kernels> usable_kernels() {
  std::vector<Kernels> kernels{{Isa::portable, false}};
  if (has_avx2()) kernels.push_back({Isa::avx2, false});
  if (has_avx2()) kernels.push_back({Isa::avx2, true});
  return kernels;
}

std::vector<float> random_floats(int64_t count, std::mt19937& rng) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(rng() % 2001) / 1000.0f - 1.0f;
  return values;
}

// Small positive floats and half floats, and any numbers.
std::vector<uint8_t> random_rows(WeightKind kind, int64_t num_rows, int64_t num_inputs, std::mt19937& rng) {
  std::vector<uint8_t> rows(static_cast<size_t>(num_rows * file_row_bytes(kind, num_inputs)));
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(rng() & 0x3f);
  return rows;
}

// `stride` floats from row to row of `x`; the result has no gaps.
std::vector<float> product(const PackedLinear& linear, const float* x, int64_t stride, int num_rows, int num_threads) {
  const int64_t width = linear_num_outputs(linear);
  std::vector<float> out(static_cast<size_t>(num_rows * width));
  Team team(num_threads);
  const AlignedBytes shared = aligned_bytes(linear_shared_scratch_bytes(linear, num_rows));
  std::vector<AlignedBytes> scratch;
  for (int i = 0; i < num_threads; ++i) scratch.push_back(aligned_bytes(linear_thread_scratch_bytes(linear, num_rows)));
  team.run([&](int thread) {
    linear_run(linear, x, stride, num_rows, out.data(), width, shared.get(), scratch[static_cast<size_t>(thread)].get(),
               team, thread);
  });
  return out;
}

void check_products(const PackedLinear& linear, std::mt19937& rng, const std::string& name) {
  constexpr int kMaxRows = 200;
  const int64_t stride = linear_num_inputs(linear) + 1;
  const std::vector<float> x = random_floats(kMaxRows * stride - 1, rng);
  const std::vector<float> all = product(linear, x.data(), stride, kMaxRows, 1);
  check(all == product(linear, x.data(), stride, kMaxRows, 2), name + ": two threads");
  const auto width = static_cast<size_t>(linear_num_outputs(linear));
  for (const int num_rows : {1, 2, 3, 4, 5, 7, 8, 9, 13, 70}) {
    const int first = kMaxRows - num_rows;
    const std::vector<float> part = product(linear, x.data() + first * stride, stride, num_rows, 1 + num_rows % 2);
    const float* expected = all.data() + static_cast<size_t>(first) * width;
    check(std::memcmp(part.data(), expected, part.size() * sizeof(float)) == 0, name + ": some rows alone");
  }
}

void check_embedding(const PackedLinear& linear) {
  const auto last = static_cast<int32_t>(linear_num_outputs(linear) - 1);
  const std::vector<int32_t> ids{0, last, last / 2};
  const int64_t width = linear_num_inputs(linear);
  std::vector<float> out(static_cast<size_t>(3 * width));
  embed_rows(linear, ids.data(), 3, 2.0f, out.data(), width);
  for (const float value : out) check(value == value, "embedding: a number");
}

void check_kind(WeightKind kind, std::mt19937& rng) {
  for (const int64_t num_inputs : {32, 256, 800, 1024}) {
    for (const int64_t num_outputs : {1, 17, 48}) {
      const std::vector<uint8_t> rows = random_rows(kind, num_outputs, num_inputs, rng);
      const std::vector<float> bias = random_floats(num_outputs, rng);
      const std::vector<LinearPart> parts{{kind, rows.data(), num_outputs, bias.data()},
                                          {kind, rows.data(), num_outputs, nullptr}};
      for (const Kernels& kernels : usable_kernels()) {
        try {
          const auto linear = pack_linear(parts, num_inputs, kernels.isa, kernels.may_widen);
          check_products(*linear, rng, linear_kernels_name(*linear));
          check_embedding(*linear);
        } catch (const std::invalid_argument&) {
          check(num_inputs % inputs_multiple(kind) != 0, "only broken blocks are refused");
        }
      }
    }
  }
}

void check_quantisation(std::mt19937& rng) {
  std::vector<float> values = random_floats(64 * 96, rng);
  for (const WeightKind kind : {WeightKind::int8, WeightKind::q4_1}) {
    std::vector<uint8_t> rows(static_cast<size_t>(64 * file_row_bytes(kind, 96)));
    check(quantise_weights(kind, values.data(), 64, 96, rows.data()), "finite weights are quantised");
    values.back() = INFINITY;
    check(!quantise_weights(kind, values.data(), 64, 96, rows.data()), "infinite weights are refused");
    values.back() = 0.0f;
  }
}

}  // namespace
}  // namespace octavo

int main() {
  std::mt19937 rng(11);
  for (int kind = 0; kind <= static_cast<int>(octavo::WeightKind::q6_k); ++kind) {
    octavo::check_kind(static_cast<octavo::WeightKind>(kind), rng);
  }
  octavo::check_quantisation(rng);
  std::printf("%d checks passed\n", octavo::num_checks);
}
