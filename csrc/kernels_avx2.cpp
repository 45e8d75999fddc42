// Kernels compiled for AVX2, FMA and F16C; this file alone carries those flags, so nothing here may run elsewhere.
#include "attention_kernel.h"
#include "hadamard.h"
#include "kernels.h"
#include "row_kernels.h"
#include "sample_kernels.h"
#include "store_kernels.h"

namespace octavo {

const Kernels& kernels_avx2() {
  using namespace OCTAVO_SIMD;
  static const Kernels kTable{
      rms_norm,
      layer_norm,
      add,
      activate,
      soft_cap,
      rotate,
      hadamard,
      hadamard_inverse,
      store_kv,
      bound_tile,
      attend,
      {highest_logit, first_index, sum_of_exp, count_before, widen, weigh_doubles, weigh_floats, lane_sum, masses_above,
       block_tops_doubles, block_tops_floats, gather_doubles, gather_floats}};
  return kTable;
}

}  // namespace octavo
