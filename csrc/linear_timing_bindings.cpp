// Times products and plain memory reads inside one team, for benchmarks: no Python between two products.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "linear.h"
#include "linear_handle.h"
#include "linear_memory.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Seconds of each pass over all products, `num_rows` rows each, after one pass that does not count.
std::vector<double> time_products(const std::vector<const PackedLinear*>& products, int num_rows, int num_threads,
                                  int num_passes) {
  size_t x_width = 0;
  size_t out_width = 0;
  size_t shared_bytes = 0;
  size_t thread_bytes = 0;
  for (const PackedLinear* product : products) {
    x_width = std::max(x_width, size_t(linear_num_inputs(*product)));
    out_width = std::max(out_width, size_t(linear_num_outputs(*product)));
    shared_bytes = std::max(shared_bytes, linear_shared_scratch_bytes(*product, num_rows));
    thread_bytes = std::max(thread_bytes, linear_thread_scratch_bytes(*product, num_rows));
  }
  const AlignedBytes x_bytes = aligned_bytes(x_width * size_t(num_rows) * sizeof(float));
  const AlignedBytes out_bytes = aligned_bytes(out_width * size_t(num_rows) * sizeof(float));
  auto* x = reinterpret_cast<float*>(x_bytes.get());
  auto* out = reinterpret_cast<float*>(out_bytes.get());
  for (size_t i = 0; i < x_width * size_t(num_rows); ++i) x[i] = float(i * 2654435761u % 4093) / 2048.0f - 1.0f;
  const AlignedBytes shared = aligned_bytes(shared_bytes);
  std::vector<AlignedBytes> scratch;
  for (int i = 0; i < num_threads; ++i) scratch.push_back(aligned_bytes(thread_bytes));

  Team team(num_threads);
  std::vector<double> seconds;
  for (int pass = -1; pass < num_passes; ++pass) {
    const Clock::time_point start = Clock::now();
    team.run([&](int thread) {
      for (const PackedLinear* product : products) {
        linear_run(*product, x, int64_t(x_width), num_rows, out, int64_t(out_width), shared.get(),
                   scratch[size_t(thread)].get(), team, thread);
        team.barrier();
      }
    });
    if (pass >= 0) seconds.push_back(seconds_since(start));
  }
  return seconds;
}

nb::list time_linears(const nb::list& products, int num_rows, int num_threads, int num_passes) {
  std::vector<const PackedLinear*> pointers;
  for (nb::handle product : products) pointers.push_back(nb::cast<const LinearHandle&>(product).linear.get());
  std::vector<double> seconds;
  {
    nb::gil_scoped_release release;
    seconds = time_products(pointers, num_rows, num_threads, num_passes);
  }
  nb::list result;
  for (const double each : seconds) result.append(each);
  return result;
}

// Seconds of each pass that reads `num_bytes` once, each thread its share.
nb::list time_read(size_t num_bytes, int num_threads, int num_passes) {
  std::vector<double> seconds;
  {
    nb::gil_scoped_release release;
    const auto memory = weight_memory(num_bytes);
    std::memset(memory.get(), 1, num_bytes);
    const auto* words = reinterpret_cast<const uint64_t*>(memory.get());
    std::vector<uint64_t> sums(size_t(num_threads) * 8);  // a cache line per thread
    Team team(num_threads);
    for (int pass = -1; pass < num_passes; ++pass) {
      const Clock::time_point start = Clock::now();
      team.run([&](int thread) {
        const Share share = share_of(int64_t(num_bytes / sizeof(uint64_t)), team.size(), thread, 512);
        uint64_t sum = 0;
        for (int64_t line = share.begin; line + 8 <= share.end; line += 8) {
          __builtin_prefetch(words + line + 512);  // as far ahead as the products look
          for (int64_t i = line; i < line + 8; ++i) sum += words[i];
        }
        sums[size_t(thread) * 8] += sum;
      });
      if (pass >= 0) seconds.push_back(seconds_since(start));
    }
  }
  nb::list result;
  for (const double each : seconds) result.append(each);
  return result;
}

}  // namespace

void bind_linear_timing(nb::module_& module) {
  module.def("time_linears", &time_linears, "products"_a, "num_rows"_a, "threads"_a, "passes"_a);
  module.def("time_read", &time_read, "num_bytes"_a, "threads"_a, "passes"_a);
}

}  // namespace octavo
