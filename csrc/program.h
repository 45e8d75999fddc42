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
  embed_position,
  layer_norm,
  rms_norm,
  head_rms_norm,
  linear,
  rope_store,
  attend,
  add,
  activate,
  soft_cap,
  route,
  expert_linear,
  combine,
  select_rows
};

constexpr int kNumOpKinds = int(OpKind::select_rows) + 1;

enum class Activation : uint8_t { silu, gelu_tanh };

struct Op {
  OpKind kind;
  int x = -1;       // buffer read (for add: also written)
  int out = -1;     // buffer written (for add: the second operand)
  int weight = -1;  // index into `linears` (embed, linear) or `vectors` (norms)
  int bias = -1;    // layer_norm: index into `vectors`
  int layer = -1;
  float value = 0;        // eps of norms, scale of embed and attend, cap of soft_cap
  float softcap = 0;      // attend: bound of the scores; 0 for none
  int sparse_tiles = 0;   // attend: tiles that a query reads; 0 for all
  int window = 0;         // attend: tokens a query sees; 0 for all
  int num_sinks = 0;      // attend: first tokens that stay visible beside the window
  int sink_q = -1;        // rope_store, attend: buffer of the queries that read sinks
  int sink_position = 0;  // rope_store: where those are rotated
  bool is_local = false;  // rope_store: rotate by the local frequencies
  int offset = 0;         // head_rms_norm: first column
  int num_heads = 0;
  int head_dim = 0;  // head_rms_norm: width of what is normalised together
  Activation activation = Activation::silu;
  bool has_gate = true;        // activate
  int num_parts = 1;           // activate: parts of a row
  int num_active = 0;          // of mixtures: experts per token
  bool is_normalised = false;  // route
  bool is_split = false;       // expert_linear: each place of the route has a part of x of its own
  int routes = -1;             // expert_linear, combine: buffer of ids and weights
  int gathered = -1;           // expert_linear: buffer of the rows of one expert
  int product = -1;            // expert_linear: and of their product
  std::vector<int> experts;    // expert_linear: index into `linears` of each expert
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
  std::vector<double> local_frequencies;  // of layers rotated on their own; empty where there are none
  double local_scaling = 1;
  std::vector<int> layer_groups;   // KV group of each layer
  std::vector<int> layer_indices;  // place of each layer in its group's block record
  int num_groups;
};

}  // namespace octavo
