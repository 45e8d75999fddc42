// Attention compiled for AVX-512. The other kernels stay those of AVX2: they wait for memory, not for arithmetic.
// See attention_select.cpp for when it is used.
#include "attention_kernel.h"
#include "kernels.h"

namespace octavo {

const AttendFunction kAttendAvx512 = OCTAVO_SIMD::attend;

}  // namespace octavo
