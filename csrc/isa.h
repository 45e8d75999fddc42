// Which instruction set the kernels of an executor use.
//
// Chosen once when an executor is made, never per call: the bits of a result may differ between instruction sets, so a
// run must not mix them. Kernels live in `*_avx2.cpp` (compiled with -mavx2 -mfma -mf16c) and in plain `*.cpp` files.
#pragma once

#include <cstdint>
#include <string>

namespace octavo {

enum class Isa : uint8_t { portable, avx2 };

// Whether this CPU (and operating system) runs AVX2, FMA and F16C code.
bool has_avx2();

// Resolves "auto", "portable" or "avx2"; throws std::invalid_argument for an unknown name or a missing instruction set.
Isa choose_isa(const std::string& name);

const char* isa_name(Isa isa);

}  // namespace octavo
