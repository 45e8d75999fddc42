// Rounding of float weights to fewer bits, for the loader.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "linear_layout.h"
#include "quant_weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Rows of blocks `[num_rows, row_bytes]`, or None where a value cannot be held.
nb::object quantise(const std::string& name, const Matrix& values) {
  if (name != "q8_0" && name != "q4_1") throw std::invalid_argument("kind: '" + name + "' is neither q8_0 nor q4_1");
  const WeightKind kind = name == "q8_0" ? WeightKind::int8 : WeightKind::q4_1;
  const auto num_rows = static_cast<int64_t>(values.shape(0));
  const auto num_inputs = static_cast<int64_t>(values.shape(1));
  const auto row_bytes = static_cast<size_t>(file_row_bytes(kind, num_inputs));
  auto bytes = std::make_unique<uint8_t[]>(static_cast<size_t>(num_rows) * row_bytes);
  bool is_held = false;
  {
    nb::gil_scoped_release release;
    is_held = quantise_weights(kind, values.data(), num_rows, num_inputs, bytes.get());
  }
  if (!is_held) return nb::none();
  uint8_t* data = bytes.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(data, {values.shape(0), row_bytes}, owner));
}

}  // namespace

void bind_quant(nb::module_& module) { module.def("quantise_weights", &quantise, "kind"_a, "values"_a); }

}  // namespace octavo
