// The Python module octavo.runtime._native. The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"
#include "isa.h"
#include "linear_handle.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_linear(nb::module_& module);  // linear_bindings.cpp

namespace {

using IntArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Ints view(const IntArray& array) { return {array.data(), array.size()}; }

// In the order of OpKind.
constexpr const char* kOpNames[] = {"embed",    "embed_position", "layer_norm",    "rms_norm", "head_rms_norm",
                                    "linear",   "rope_store",     "attend",        "add",      "activate",
                                    "soft_cap", "route",          "expert_linear", "combine",  "select_rows"};
static_assert(std::size(kOpNames) == kNumOpKinds);

OpKind op_kind(const std::string& name) {
  for (int kind = 0; kind < kNumOpKinds; ++kind) {
    if (name == kOpNames[kind]) return OpKind(kind);
  }
  throw std::invalid_argument("op kind: '" + name + "' is not known");
}

KvType kv_type(const std::string& name) {
  static const std::map<std::string, KvType> kTypes{{"f32", KvType::f32},   {"f16", KvType::f16},
                                                    {"bf16", KvType::bf16}, {"int8", KvType::int8},
                                                    {"int4", KvType::int4}, {"fp8_e4m3", KvType::fp8_e4m3}};
  return kTypes.at(name);
}

// How each layer is held.
std::vector<KvType> kv_types(const nb::dict& config, size_t num_layers) {
  std::vector<KvType> types(num_layers, kv_type(nb::cast<std::string>(config["kv_dtype"])));
  for (nb::handle layer : nb::cast<nb::tuple>(config["kv_skip_layers"])) {
    types.at(nb::cast<size_t>(layer)) = kv_type(nb::cast<std::string>(config["skipped_kv_dtype"]));
  }
  return types;
}

// Which layers keep bounds of their tiles.
std::vector<bool> bounded_layers(const nb::dict& config, size_t num_layers) {
  std::vector<bool> bounded(num_layers);
  for (nb::handle layer : nb::cast<nb::list>(config["bounded_layers"])) bounded.at(nb::cast<size_t>(layer)) = true;
  return bounded;
}

template <class T>
T get(const nb::dict& record, const char* key, T missing) {
  return record.contains(key) ? nb::cast<T>(record[key]) : missing;
}

Op op_of(const nb::dict& record) {
  Op op{};
  op.kind = op_kind(nb::cast<std::string>(record["kind"]));
  op.x = get(record, "x", -1);
  op.out = get(record, "out", -1);
  op.weight = get(record, "weight", -1);
  op.layer = get(record, "layer", -1);
  op.value = get(record, "value", 0.0f);
  op.window = get(record, "window", 0);
  op.num_sinks = get(record, "num_sinks", 0);
  op.sink_q = get(record, "sink_q", -1);
  op.sink_position = get(record, "sink_position", 0);
  op.offset = get(record, "offset", 0);
  op.num_heads = get(record, "num_heads", 0);
  op.head_dim = get(record, "head_dim", 0);
  op.bias = get(record, "bias", -1);
  op.softcap = get(record, "softcap", 0.0f);
  op.sparse_tiles = get(record, "sparse_tiles", 0);
  op.is_local = get(record, "is_local", false);
  op.activation = get(record, "is_gelu", false) ? Activation::gelu_tanh : Activation::silu;
  op.has_gate = get(record, "has_gate", true);
  op.num_parts = get(record, "num_parts", 1);
  op.num_active = get(record, "num_active", 0);
  op.is_normalised = get(record, "is_normalised", false);
  op.is_split = get(record, "is_split", false);
  op.routes = get(record, "routes", -1);
  op.gathered = get(record, "gathered", -1);
  op.product = get(record, "product", -1);
  op.experts = get(record, "experts", std::vector<int>{});
  return op;
}

Buffer buffer_of(const nb::dict& record) {
  return {nb::cast<int>(record["width"]), nb::cast<int64_t>(record["stride"]),
          nb::cast<int64_t>(record["offset_bytes"]), nb::cast<bool>(record["is_selected"])};
}

Program program_of(const nb::dict& record) {
  Program program;
  for (nb::handle op : nb::cast<nb::list>(record["ops"])) program.ops.push_back(op_of(nb::cast<nb::dict>(op)));
  for (nb::handle each : nb::cast<nb::list>(record["buffers"])) {
    program.buffers.push_back(buffer_of(nb::cast<nb::dict>(each)));
  }
  for (nb::handle each : nb::cast<nb::list>(record["linears"])) {
    program.linears.push_back(nb::cast<const LinearHandle&>(each).linear);
  }
  for (nb::handle each : nb::cast<nb::list>(record["vectors"])) {
    const auto vector = nb::cast<FloatArray>(each);
    program.vectors.emplace_back(vector.data(), vector.data() + vector.size());
  }
  program.logits = nb::cast<int>(record["logits"]);
  program.arena_bytes = nb::cast<int64_t>(record["arena_bytes"]);
  return program;
}

ModelSizes sizes_of(const nb::dict& record) {
  return {
      .vocab_size = nb::cast<int>(record["vocab_size"]),
      .num_heads = nb::cast<int>(record["num_heads"]),
      .num_kv_heads = nb::cast<int>(record["num_kv_heads"]),
      .head_dim = nb::cast<int>(record["head_dim"]),
      .rotary_dim = nb::cast<int>(record["rotary_dim"]),
      .inverse_frequencies = nb::cast<std::vector<double>>(record["inverse_frequencies"]),
      .attention_scaling = nb::cast<double>(record["attention_scaling"]),
      .local_frequencies = nb::cast<std::vector<double>>(record["local_frequencies"]),
      .local_scaling = nb::cast<double>(record["local_scaling"]),
      .layer_groups = nb::cast<std::vector<int>>(record["layer_groups"]),
      .layer_indices = nb::cast<std::vector<int>>(record["layer_indices"]),
      .num_groups = nb::cast<int>(record["num_groups"]),
  };
}

ExecutorConfig config_of(const nb::dict& record, const ModelSizes& sizes) {
  return {
      .num_blocks = nb::cast<int64_t>(record["num_blocks"]),
      .block_size = nb::cast<int>(record["block_size"]),
      .kv_types = kv_types(record, sizes.layer_groups.size()),
      .bounded_layers = bounded_layers(record, sizes.layer_groups.size()),
      .max_num_tokens = nb::cast<int>(record["max_num_tokens"]),
      .max_num_requests = nb::cast<int>(record["max_num_requests"]),
      .max_num_selected = nb::cast<int>(record["max_num_selected"]),
      .num_threads = nb::cast<int>(record["num_threads"]),
      .isa = choose_isa(nb::cast<std::string>(record["isa"])),
      .may_widen = nb::cast<std::string>(record["isa"]) == "auto",
      .prefault = nb::cast<bool>(record["prefault"]),
      .poison = nb::cast<bool>(record["poison"]),
      .is_timed = nb::cast<bool>(record["is_timed"]),
  };
}

// What a call of `step` hands over; keeps the arrays alive that the views look into.
struct HeldStep {
  StepInput input;
  std::vector<IntArray> arrays;
  std::vector<int32_t> new_blocks;
  std::vector<std::vector<uint32_t>> masks;

  std::span<const uint32_t> hold_mask(const nb::bytes& words) {
    if (words.size() % sizeof(uint32_t) != 0) throw std::invalid_argument("samples allowed: not whole 32-bit words");
    std::vector<uint32_t>& mask = masks.emplace_back(words.size() / sizeof(uint32_t));
    const auto* bytes = reinterpret_cast<const uint8_t*>(words.c_str());
    for (size_t i = 0; i < words.size(); ++i) mask[i / 4] |= uint32_t(bytes[i]) << (8 * (i % 4));
    return mask;
  }

  Ints hold(nb::handle object) {
    arrays.push_back(nb::cast<IntArray>(object));
    return view(arrays.back());
  }
};

// (logits_row, position, seed, temperature, top_p, top_k, min_p, repetition, presence, frequency, num_logprobs,
//  banned ids, bias pairs, prompt ids, output ids, mask of allowed ids or None)
SampleRequest sample_of(const nb::tuple& fields, HeldStep& held) {
  SampleRequest request{};
  request.logits_row = nb::cast<int32_t>(fields[0]);
  request.position = nb::cast<int32_t>(fields[1]);
  request.seed = nb::cast<int64_t>(fields[2]);
  request.temperature = nb::cast<double>(fields[3]);
  request.top_p = nb::cast<double>(fields[4]);
  request.top_k = nb::cast<int32_t>(fields[5]);
  request.min_p = nb::cast<double>(fields[6]);
  request.repetition_penalty = nb::cast<double>(fields[7]);
  request.presence_penalty = nb::cast<double>(fields[8]);
  request.frequency_penalty = nb::cast<double>(fields[9]);
  request.num_logprobs = nb::cast<int32_t>(fields[10]);
  for (nb::handle id : nb::cast<nb::tuple>(fields[11])) request.banned.push_back(nb::cast<int32_t>(id));
  for (nb::handle pair : nb::cast<nb::tuple>(fields[12])) {
    request.bias.emplace_back(nb::cast<int32_t>(pair[0]), nb::cast<double>(pair[1]));
  }
  request.prompt = held.hold(fields[13]);
  request.output = held.hold(fields[14]);
  if (!fields[15].is_none()) request.allowed = held.hold_mask(nb::cast<nb::bytes>(fields[15]));
  return request;
}

nb::tuple logprobs_tuple(const TokenLogprobs& answer) {
  nb::list top;
  for (const auto& [id, logprob] : answer.top) top.append(nb::make_tuple(id, logprob));
  return nb::make_tuple(answer.token_id, answer.logprob, answer.rank, nb::tuple(top));
}

nb::tuple run_step(Executor& executor, nb::handle query_offsets, nb::handle start_positions, nb::handle token_ids,
                   const nb::list& tables, const nb::list& copies, const nb::tuple& new_blocks,
                   nb::handle selected_rows, const nb::list& samples, const nb::list& scores) {
  HeldStep held;
  StepInput& input = held.input;
  input.query_offsets = held.hold(query_offsets);
  input.start_positions = held.hold(start_positions);
  input.token_ids = held.hold(token_ids);
  input.selected_rows = held.hold(selected_rows);
  for (nb::handle table : tables) input.tables.push_back({held.hold(table[0]), held.hold(table[1])});
  for (nb::handle copy : copies) input.copies.push_back({nb::cast<int32_t>(copy[0]), nb::cast<int32_t>(copy[1])});
  for (nb::handle id : new_blocks) held.new_blocks.push_back(nb::cast<int32_t>(id));
  input.new_blocks = held.new_blocks;
  for (nb::handle sample : samples) input.samples.push_back(sample_of(nb::cast<nb::tuple>(sample), held));
  for (nb::handle score : scores) {
    input.scores.push_back({nb::cast<int32_t>(score[0]), nb::cast<int32_t>(score[1]), held.hold(score[2])});
  }
  StepOutput output;
  {
    nb::gil_scoped_release release;
    executor.step(input, output);
  }
  nb::list tokens;
  for (const SampleAnswer& answer : output.samples) {
    tokens.append(nb::make_tuple(answer.token_id,
                                 answer.has_logprobs ? nb::object(logprobs_tuple(answer.logprobs)) : nb::none()));
  }
  nb::list scored;
  for (const auto& answers : output.scores) {
    nb::list rows;
    for (const TokenLogprobs& answer : answers) rows.append(logprobs_tuple(answer));
    scored.append(nb::tuple(rows));
  }
  return nb::make_tuple(tokens, scored);
}

// The stored bytes of one layer of a block: keys and values as [num_kv_heads, block_size, bytes of a row], and for
// quantised types their scales as [num_kv_heads, block_size, bytes of a scale].
nb::tuple read_kv(Executor& executor, int64_t block_id, int layer) {
  if (block_id < 1 || block_id > executor.pool().num_blocks()) throw std::out_of_range("block_id");
  if (layer < 0 || layer >= int(executor.sizes().layer_indices.size())) throw std::out_of_range("layer");
  const KvLayout& layout = executor.layout(layer);
  const size_t row_bytes = layout.row_bytes();
  // A key is in pieces, one per item: a number, or a byte of two int4.
  const size_t item_bytes = is_quantised(layout.type) ? 1 : row_bytes / size_t(layout.head_dim);
  struct Part {
    size_t after_keys;
    size_t bytes;  // of a token
    size_t piece_bytes;
  };
  std::vector<Part> parts{{0, row_bytes, item_bytes}, {layout.values_after_keys(), row_bytes, row_bytes}};
  if (is_quantised(layout.type)) {
    parts.push_back({layout.key_scales_after_keys(), sizeof(uint16_t), sizeof(uint16_t)});
    parts.push_back({layout.value_scales_after_keys(), sizeof(uint16_t), sizeof(uint16_t)});
  }
  nb::list arrays;
  for (const Part& part : parts) {
    const size_t count = size_t(layout.num_kv_heads * layout.block_size);
    uint8_t* to = new uint8_t[count * part.bytes];
    nb::capsule owner(to, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
    for (size_t i = 0; i < count; ++i) {
      const int head = int(i) / layout.block_size, place = int(i) % layout.block_size;
      const std::byte* from = executor.pool().data() + layout.keys_offset(block_id, head, place / kTileTokens) +
                              part.after_keys + size_t(place % kTileTokens) * part.piece_bytes;
      for (size_t at = 0; at < part.bytes; at += part.piece_bytes) {
        std::memcpy(to + i * part.bytes + at, from + at * kTileTokens, part.piece_bytes);
      }
    }
    arrays.append(nb::ndarray<nb::numpy, uint8_t>(
        to, {size_t(layout.num_kv_heads), size_t(layout.block_size), part.bytes}, owner));
  }
  return nb::tuple(arrays);
}

nb::dict seconds_of(const Executor& executor) {
  nb::dict seconds;
  for (int kind = 0; kind < kNumOpKinds; ++kind) seconds[kOpNames[kind]] = executor.seconds().ops[kind];
  seconds["prepare"] = executor.seconds().prepare;
  seconds["sample"] = executor.seconds().sample;
  return seconds;
}

nb::ndarray<nb::numpy, float> read_buffer(Executor& executor, int index, int num_rows) {
  const Buffer& buffer = executor.program().buffers.at(size_t(index));
  float* copy = new float[size_t(num_rows) * size_t(buffer.width)];
  for (int row = 0; row < num_rows; ++row) {
    std::memcpy(copy + int64_t(row) * buffer.width, executor.buffer(index) + row * buffer.stride,
                size_t(buffer.width) * sizeof(float));
  }
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::ndarray<nb::numpy, float>(copy, {size_t(num_rows), size_t(buffer.width)}, owner);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, module) {
  using namespace octavo;
  module.doc() = "Octavo's kernels for the CPU";
  module.def(
      "isa_name", [](const std::string& name) { return std::string(isa_name(choose_isa(name))); }, "name"_a,
      "The instruction set that `auto`, `portable` or `avx2` stands for on this machine.");
  bind_linear(module);
  nb::class_<Executor>(module, "Executor", "Executes the steps of one model; see native_runner.py.")
      .def(
          "__init__",
          [](Executor* self, const nb::dict& program, const nb::dict& sizes, const nb::dict& config) {
            ModelSizes model_sizes = sizes_of(sizes);
            ExecutorConfig executor_config = config_of(config, model_sizes);
            new (self) Executor(program_of(program), std::move(model_sizes), std::move(executor_config));
          },
          "program"_a, "sizes"_a, "config"_a)
      .def("step", &run_step, "query_offsets"_a, "start_positions"_a, "token_ids"_a, "tables"_a, "copies"_a,
           "new_blocks"_a, "selected_rows"_a, "samples"_a, "scores"_a)
      .def("read_kv", &read_kv, "block_id"_a, "layer"_a)
      .def("read_buffer", &read_buffer, "index"_a, "num_rows"_a)
      .def_prop_ro("pool_bytes", [](Executor& executor) { return executor.pool().mapped_bytes(); })
      .def_prop_ro("arena_bytes", [](Executor& executor) { return executor.program().arena_bytes; })
      .def_prop_ro("scratch_bytes", &Executor::scratch_bytes)
      .def_prop_ro("num_shared_items", &Executor::num_shared_items)
      .def_prop_ro("seconds", &seconds_of);
}
