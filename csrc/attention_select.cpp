// Chooses attention kernels, and makes sure that a choice between them can never change a bit.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "aligned.h"
#include "kernels.h"
#include "kv_pool.h"

namespace octavo {
namespace {

#if OCTAVO_HAVE_AVX2 && OCTAVO_HAVE_AVX512

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// A chunk across a split boundary, one row, and a window's edge, on random numbers.
bool gives_same_bits(AttentionShape shape, KvType type, int sparse_tiles) {
  std::mt19937 rng(1);  // the same everywhere: a selection must not be a matter of luck
  const auto number = [&rng] { return static_cast<float>(rng() >> 8) * 0x1p-23f - 1.0f; };
  const KvLayout layout =
      lay_out_layers({type}, {sparse_tiles > 0}, {0}, {0}, {type, shape.num_kv_heads, shape.head_dim, kTileTokens})
          .front();
  const std::vector<int32_t> query_offsets{0, 19, 20, 27};
  const std::vector<int32_t> start_positions{kSplitTokens - 7, 40, 0};
  std::vector<int32_t> block_ids, table_offsets{0};
  for (size_t r = 0; r < start_positions.size(); ++r) {
    const int end = start_positions[r] + query_offsets[r + 1] - query_offsets[r];
    for (int position = 0; position < end; position += kTileTokens) block_ids.push_back(int32_t(block_ids.size()) + 1);
    table_offsets.push_back(int32_t(block_ids.size()));
  }
  KvPool pool(layout.block_bytes, int64_t(block_ids.size()));
  std::vector<float> key(size_t(shape.head_dim)), value(key.size());
  for (const int32_t block : block_ids) {
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      for (int place = 0; place < kTileTokens; ++place) {
        std::generate(key.begin(), key.end(), [&] { return 3.0f * number(); });
        std::generate(value.begin(), value.end(), number);
        kernels_avx2().store_kv(layout, pool.data() + layout.keys_offset(block, head, 0), place, key.data(),
                                value.data());
      }
      if (sparse_tiles > 0) {
        kernels_avx2().bound_tile(layout, pool.data() + layout.keys_offset(block, head, 0));
      }
    }
  }
  const int num_tokens = query_offsets.back();
  const int64_t width = int64_t(shape.num_heads) * shape.head_dim;
  std::vector<float> q(size_t(num_tokens * width));
  std::generate(q.begin(), q.end(), number);
  std::vector<float> outputs[2] = {std::vector<float>(q.size(), 1.0f), std::vector<float>(q.size(), 2.0f)};
  const AttentionBatch batch{3, query_offsets.data(), start_positions.data(), block_ids.data(), table_offsets.data()};
  AttentionSchedule schedule(shape, sparse_tiles, num_tokens, 3, 1);
  schedule.build(batch, kTileTokens);
  const size_t scratch_floats =
      attention_scratch_floats(shape.head_dim) + selection_scratch_floats(shape.head_dim, int64_t(block_ids.size()));
  const AlignedBytes scratch = aligned_bytes(scratch_floats * sizeof(float));
  const AttendFunction kernels[2] = {kernels_avx2().attend, kAttendAvx512};
  for (int i = 0; i < 2; ++i) {
    const AttentionCall call{shape, batch,       1.0f,   sparse_tiles, 0.0f, q.data(), width, outputs[i].data(),
                             width, pool.data(), layout, q.data(),     width};
    for (int64_t j = 0; j < schedule.num_items(); ++j) {
      kernels[i](call, schedule, schedule.item(j), reinterpret_cast<float*>(scratch.get()));
    }
  }
  return std::memcmp(outputs[0].data(), outputs[1].data(), q.size() * sizeof(float)) == 0;
}

bool is_avx512_usable() {
  if (!has_avx512()) return false;
  for (const KvType type : {KvType::f32, KvType::f16, KvType::bf16, KvType::int8, KvType::fp8_e4m3, KvType::int4}) {
    for (const AttentionShape shape : {AttentionShape{3, 1, 64, 0}, AttentionShape{8, 1, 40, 0},
                                       AttentionShape{2, 2, 100, 33}, AttentionShape{3, 1, 64, 33, 5}}) {
      if (!gives_same_bits(shape, type, 0)) return false;
      if (shape.window == 0 && !gives_same_bits(shape, type, 5)) return false;
    }
  }
  return true;
}

AttendFunction wider_attend() {
  static const bool is_usable = is_avx512_usable();
  return is_usable ? kAttendAvx512 : nullptr;
}

#else

AttendFunction wider_attend() { return nullptr; }

#endif

}  // namespace

AttendFunction choose_attend(Isa isa, bool may_widen) {
  const AttendFunction wider = isa == Isa::avx2 && may_widen ? wider_attend() : nullptr;
  return wider != nullptr ? wider : kernels_of(isa).attend;
}

}  // namespace octavo
