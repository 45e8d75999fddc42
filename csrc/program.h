// A model's program as the executor runs it: ops as plain records, names resolved to indices.
//
// What each op computes is defined where the program is emitted (octavo/models/program.py); this is the same list
// with buffers and weights numbered.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear.h"

namespace octavo {

enum class OpKind : uint8_t {
  embed,
  rms_norm,
  head_rms_norm,
  linear,
  rope_store,
  attend,
  add,
  silu_gated,
  select_rows
};

constexpr int kNumOpKinds = int(OpKind::select_rows) + 1;

struct Op {
  OpKind kind;
  int x = -1;       // buffer read (for add: also written)
  int out = -1;     // buffer written (for add: the second operand)
  int weight = -1;  // index into `linears` (embed, linear) or `vectors` (norms)
  int layer = -1;
  float value = 0;  // eps of norms, scale of embed and attend
  int window = 0;   // attend: tokens a query sees; 0 for all
  int offset = 0;   // head_rms_norm: first column
  int num_heads = 0;
};

struct Buffer {
  int width;
  int64_t stride;        // floats from row to row, a multiple of 16
  int64_t offset_bytes;  // in the arena, a multiple of 64
  bool is_selected;      // one row per selected token, instead of per token
};

struct Program {
  std::vector<Op> ops;
  std::vector<Buffer> buffers;
  std::vector<std::shared_ptr<const PackedLinear>> linears;
  std::vector<std::vector<float>> vectors;
  int logits;
  int64_t arena_bytes;
};

struct ModelSizes {
  int vocab_size;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int rotary_dim;  // 0: no rotation
  std::vector<double> inverse_frequencies;
  double attention_scaling;
  std::vector<int> layer_groups;   // KV group of each layer
  std::vector<int> layer_indices;  // place of each layer in its group's block record
  int num_groups;
};

}  // namespace octavo
