// Packed weights in Python: made once at load, handed to executors; `run` and `embed` are for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "aligned.h"
#include "isa.h"
#include "linear.h"
#include "linear_handle.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_quant(nb::module_& module);          // quant_bindings.cpp
void bind_linear_timing(nb::module_& module);  // linear_timing_bindings.cpp

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

WeightKind weight_kind(const std::string& name) {
  static const std::map<std::string, WeightKind> kKinds{
      {"f32", WeightKind::f32},   {"f16", WeightKind::f16},   {"bf16", WeightKind::bf16}, {"q8_0", WeightKind::int8},
      {"q4_0", WeightKind::q4_0}, {"q4_1", WeightKind::q4_1}, {"q4_k", WeightKind::q4_k}, {"q6_k", WeightKind::q6_k}};
  const auto found = kKinds.find(name);
  if (found == kKinds.end()) throw std::invalid_argument("kind: '" + name + "' is not held by the native runner");
  return found->second;
}

// `parts` is a list of (kind, bytes of the rows, num_outputs, bias or None).
LinearHandle pack(const nb::list& parts, int64_t num_inputs, const std::string& isa, bool may_widen) {
  std::vector<LinearPart> packed;
  std::vector<Bytes> rows;
  std::vector<Floats> biases;
  rows.reserve(parts.size());
  biases.reserve(parts.size());
  for (nb::handle part : parts) {
    rows.push_back(nb::cast<Bytes>(part[1]));
    const float* bias = nullptr;
    if (!part[3].is_none()) {
      biases.push_back(nb::cast<Floats>(part[3]));
      bias = biases.back().data();
    }
    packed.push_back(
        {weight_kind(nb::cast<std::string>(part[0])), rows.back().data(), nb::cast<int64_t>(part[2]), bias});
  }
  nb::gil_scoped_release release;
  return {pack_linear(packed, num_inputs, choose_isa(isa), may_widen)};
}

nb::ndarray<nb::numpy, float> new_matrix(int64_t num_rows, int64_t width, float*& data) {
  data = new float[size_t(num_rows * width)];
  std::memset(data, 0xff, size_t(num_rows * width) * sizeof(float));  // NaN: what is not written shows
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::ndarray<nb::numpy, float>(data, {size_t(num_rows), size_t(width)}, owner);
}

nb::ndarray<nb::numpy, float> run(const LinearHandle& self, const Matrix& x, int num_threads, int repeats) {
  const PackedLinear& linear = *self.linear;
  const int num_rows = int(x.shape(0));
  if (int64_t(x.shape(1)) != linear_num_inputs(linear)) throw std::invalid_argument("x: width is not num_inputs");
  float* out = nullptr;
  auto result = new_matrix(num_rows, linear_num_outputs(linear), out);
  nb::gil_scoped_release release;
  Team team(num_threads);
  const AlignedBytes shared = aligned_bytes(linear_shared_scratch_bytes(linear, num_rows));
  std::vector<AlignedBytes> scratch;
  for (int i = 0; i < num_threads; ++i) scratch.push_back(aligned_bytes(linear_thread_scratch_bytes(linear, num_rows)));
  for (int i = 0; i < repeats; ++i) {
    team.run([&](int thread) {
      linear_run(linear, x.data(), int64_t(x.shape(1)), num_rows, out, linear_num_outputs(linear), shared.get(),
                 scratch[size_t(thread)].get(), team, thread);
    });
  }
  return result;
}

nb::ndarray<nb::numpy, float> embed(const LinearHandle& self, const IntArray& token_ids, float scale) {
  const PackedLinear& linear = *self.linear;
  for (size_t i = 0; i < token_ids.size(); ++i) {
    if (token_ids(i) < 0 || token_ids(i) >= linear_num_outputs(linear)) throw std::out_of_range("token_ids");
  }
  float* out = nullptr;
  auto result = new_matrix(int64_t(token_ids.size()), linear_num_inputs(linear), out);
  embed_rows(linear, token_ids.data(), int(token_ids.size()), scale, out, linear_num_inputs(linear));
  return result;
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<LinearHandle>(module, "PackedLinear", "Weights of one product, packed for register tiles.")
      .def("run", &run, "x"_a, "threads"_a = 1, "repeats"_a = 1)
      .def("embed", &embed, "token_ids"_a, "scale"_a = 1.0f)
      .def_prop_ro("num_outputs", [](const LinearHandle& self) { return linear_num_outputs(*self.linear); })
      .def_prop_ro("num_inputs", [](const LinearHandle& self) { return linear_num_inputs(*self.linear); })
      .def_prop_ro("kernels", [](const LinearHandle& self) { return linear_kernels_name(*self.linear); })
      .def_prop_ro("resident_bytes", [](const LinearHandle& self) { return linear_resident_bytes(*self.linear); });
  bind_quant(module);
  bind_linear_timing(module);
  module.def("pack_linear", &pack, "parts"_a, "num_inputs"_a, "isa"_a = "auto", "may_widen"_a = true);
}

}  // namespace octavo
