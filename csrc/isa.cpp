#include "isa.h"

#include <stdexcept>

namespace octavo {

bool has_avx2() {
#if OCTAVO_HAVE_AVX2
  // The compiler's check includes the operating system's consent (XGETBV).
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

Isa choose_isa(const std::string& name) {
  if (name == "auto") return has_avx2() ? Isa::avx2 : Isa::portable;
  if (name == "portable") return Isa::portable;
  if (name != "avx2") throw std::invalid_argument("isa: '" + name + "' is not one of auto, portable, avx2");
  if (!has_avx2()) throw std::invalid_argument("isa: this CPU lacks AVX2, FMA or F16C");
  return Isa::avx2;
}

const char* isa_name(Isa isa) { return isa == Isa::avx2 ? "avx2" : "portable"; }

}  // namespace octavo
