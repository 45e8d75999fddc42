#include "executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace octavo {
namespace {

// Ops that compute each row from that row alone; a selected row, from the token row that it is a copy of.
bool is_row_wise(OpKind kind) {
  return kind != OpKind::linear && kind != OpKind::attend && kind != OpKind::route && kind != OpKind::expert_linear;
}

size_t find_first_selected_op(const Program& program) {
  size_t i = 0;
  while (i < program.ops.size() && program.ops[i].kind != OpKind::select_rows) ++i;
  return i;
}

// Angles of a position, in double precision and rounded once, so that every runner has the same bits.
void turn(int position, const std::vector<double>& frequencies, double scaling, float* cosines, float* sines) {
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double angle = double(position) * frequencies[i];
    cosines[i] = float(std::cos(angle) * scaling);
    sines[i] = float(std::sin(angle) * scaling);
  }
}

// Rows of later tiles are selected after earlier tiles have been computed: what they are selected from must last.
void check_selected_sources_last(const Program& program, size_t first_selected_op, int max_selected) {
  const auto end_of = [](const Buffer& b, int64_t rows) { return b.offset_bytes + rows * b.stride * 4; };
  for (size_t i = first_selected_op; i < program.ops.size(); ++i) {
    if (program.ops[i].kind != OpKind::select_rows) continue;
    const Buffer& source = program.buffers[size_t(program.ops[i].x)];
    for (const Buffer& other : program.buffers) {
      if (!other.is_selected) continue;
      const bool is_apart =
          end_of(other, max_selected) <= source.offset_bytes || end_of(source, 1) <= other.offset_bytes;
      if (!is_apart) throw std::invalid_argument("arena: a buffer of selected rows lies over what they come from");
    }
  }
}

std::vector<KvLayout> layouts_of(const ModelSizes& sizes, const ExecutorConfig& config) {
  const KvLayout plain{KvType::f32, sizes.num_kv_heads, sizes.head_dim, config.block_size};
  return lay_out_layers(config.kv_types, config.bounded_layers, sizes.layer_groups, sizes.layer_indices, plain);
}

void check_sizes(const ModelSizes& sizes, const ExecutorConfig& config) {
  const auto require = [](bool is_right, const char* message) {
    if (!is_right) throw std::invalid_argument(message);
  };
  require(config.block_size > 0 && config.block_size % kTileTokens == 0, "block_size: not a multiple of 16");
  require(sizes.num_kv_heads > 0 && sizes.num_heads % sizes.num_kv_heads == 0,
          "num_heads: not a multiple of num_kv_heads");
  require(sizes.rotary_dim % 2 == 0 && sizes.rotary_dim <= sizes.head_dim, "rotary_dim: odd, or more than head_dim");
  require(int(sizes.inverse_frequencies.size()) == sizes.rotary_dim / 2,
          "inverse_frequencies: length is not rotary_dim / 2");
  require(sizes.head_dim <= kMaxHeadDim, "head_dim: more than 1024");
  require(config.bounded_layers.size() == config.kv_types.size(), "bounded_layers: not one for each layer");
  require(config.kv_types.size() == sizes.layer_groups.size() && sizes.layer_groups.size() > 0 &&
              sizes.layer_groups.size() == sizes.layer_indices.size(),
          "kv_types: not one for each layer");
  for (const KvType type : config.kv_types) {
    require(type != KvType::int4 || sizes.head_dim % 2 == 0, "head_dim: odd, and int4 packs dimensions in pairs");
  }
  require(sizes.local_frequencies.empty() || sizes.local_frequencies.size() == sizes.inverse_frequencies.size(),
          "local_frequencies: length is not rotary_dim / 2");
  require(config.num_threads > 0 && config.max_num_tokens > 0 && config.max_num_requests > 0 &&
              config.max_num_selected > 0 && config.num_blocks > 0,
          "limits: all must be at least 1");
}

}  // namespace

Executor::Executor(Program program, ModelSizes sizes, ExecutorConfig config)
    : program_((check_sizes(sizes, config), std::move(program))),
      sizes_(std::move(sizes)),
      config_(config),
      kernels_(kernels_of(config.isa)),
      attend_(choose_attend(config.isa, config.may_widen)),
      first_selected_op_(find_first_selected_op(program_)),
      team_(config.num_threads),
      layouts_(layouts_of(sizes_, config)),
      pool_(layouts_[0].block_bytes, config.num_blocks) {
  check_selected_sources_last(program_, first_selected_op_, config_.max_num_selected);
  const int max_tokens = config_.max_num_tokens;
  const int num_logits = program_.buffers[size_t(program_.logits)].width;
  limits_ = {
      .max_num_tokens = max_tokens,
      .max_num_requests = config_.max_num_requests,
      .vocab_size = sizes_.vocab_size,
      .num_logits = num_logits,
      .block_size = config_.block_size,
      .num_blocks = config_.num_blocks,
      .windows = std::vector<int>(size_t(sizes_.num_groups), 0),
      .num_sinks = std::vector<int>(size_t(sizes_.num_groups), 0),
  };
  find_phases();
  schedules_.resize(2 * size_t(sizes_.num_groups));
  arena_ = aligned_bytes(size_t(program_.arena_bytes));
  thread_scratch_bytes_ = attention_scratch_floats(sizes_.head_dim) * sizeof(float);
  for (const Op& op : program_.ops) {
    if (op.sparse_tiles == 0) continue;
    if (!layouts_[size_t(op.layer)].has_bounds) throw std::invalid_argument("sparse_tiles: the layer has no bounds");
    reads_sparsely_ = true;
  }
  if (reads_sparsely_) {
    const int64_t max_tiles = config_.num_blocks * config_.block_size / kTileTokens;
    thread_scratch_bytes_ += selection_scratch_floats(sizes_.head_dim, max_tiles) * sizeof(float);
    whole_tiles_.reserve(size_t(max_tokens / kTileTokens + config_.max_num_requests));
  }
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    const Op& op = program_.ops[i];
    const int rows = i < first_selected_op_ ? max_tokens : config_.max_num_selected;
    std::vector<int> linears = op.experts;
    if (op.kind == OpKind::linear) linears.push_back(op.weight);
    for (const int index : linears) {
      const PackedLinear& linear = *program_.linears[size_t(index)];
      shared_scratch_bytes_ = std::max(shared_scratch_bytes_, linear_shared_scratch_bytes(linear, rows));
      thread_scratch_bytes_ = std::max(thread_scratch_bytes_, linear_thread_scratch_bytes(linear, rows));
    }
    if (op.kind == OpKind::route) {
      const int num_experts = program_.buffers[size_t(op.x)].width;
      routings_.push_back({std::vector<int32_t>(size_t(num_experts) + 1),
                           std::vector<int32_t>(size_t(max_tokens) * size_t(op.num_active))});
    }
    routing_of_op_.push_back(routings_.empty() ? 0 : routings_.size() - 1);
    if (op.kind == OpKind::rope_store && op.sink_q >= 0 && sink_cosines_.empty()) {
      sink_cosines_.resize(size_t(sizes_.rotary_dim / 2));
      sink_sines_.resize(sink_cosines_.size());
      turn(op.sink_position, sizes_.inverse_frequencies, sizes_.attention_scaling, sink_cosines_.data(),
           sink_sines_.data());
    }
    if (op.kind == OpKind::attend) {
      const size_t group = size_t(sizes_.layer_groups[size_t(op.layer)]);
      limits_.windows[group] = op.window;
      limits_.num_sinks[group] = op.num_sinks;
      std::unique_ptr<AttentionSchedule>& schedule = schedule_of(op);
      if (schedule == nullptr) {
        schedule = std::make_unique<AttentionSchedule>(
            AttentionShape{sizes_.num_heads, sizes_.num_kv_heads, sizes_.head_dim, op.window, op.num_sinks},
            op.sparse_tiles, max_tokens, config_.max_num_requests, config_.num_threads);
      }
    }
  }
  shared_scratch_ = aligned_bytes(shared_scratch_bytes_);
  for (int thread = 0; thread < config_.num_threads; ++thread) {
    thread_scratch_.push_back(aligned_bytes(thread_scratch_bytes_));
    samplers_.emplace_back(kernels_.sample, num_logits);
  }
  questions_.reserve(size_t(max_tokens) + size_t(config_.max_num_requests));
  row_positions_.resize(size_t(max_tokens));
  row_places_.resize(size_t(max_tokens));
  row_blocks_.assign(size_t(sizes_.num_groups), std::vector<int32_t>(size_t(max_tokens)));
  cosines_.resize(size_t(max_tokens) * size_t(sizes_.rotary_dim / 2));
  sines_.resize(cosines_.size());
  if (!sizes_.local_frequencies.empty()) local_cosines_.resize(cosines_.size());
  local_sines_.resize(local_cosines_.size());
  if (config_.prefault) pool_.prefault();
}

size_t Executor::scratch_bytes() const {
  size_t bytes = shared_scratch_bytes_ + size_t(config_.num_threads) * thread_scratch_bytes_ +
                 2 * (cosines_.size() + local_cosines_.size()) * sizeof(float) +
                 row_places_.size() * sizeof(int32_t) * size_t(2 + sizes_.num_groups);
  for (const Routing& routing : routings_) bytes += (routing.offsets.size() + routing.slots.size()) * sizeof(int32_t);
  for (const auto& schedule : schedules_) bytes += schedule == nullptr ? 0 : schedule->resident_bytes();
  for (const Sampler& sampler : samplers_) bytes += sampler.resident_bytes();
  return bytes;
}

size_t Executor::num_shared_items() const {
  size_t count = 0;
  for (const auto& schedule : schedules_) count += schedule == nullptr ? 0 : schedule->num_shared_items();
  return count;
}

void Executor::find_phases() {
  const std::vector<Op>& ops = program_.ops;
  const bool joins = !config_.is_timed;  // time is kept by op
  for (size_t begin = 0; begin < ops.size();) {
    size_t end = begin + 1;
    while (joins && end < ops.size() && end != first_selected_op_ && is_row_wise(ops[begin].kind) &&
           is_row_wise(ops[end].kind)) {
      ++end;
    }
    phases_.push_back({ops[begin].kind, begin, end});
    begin = end;
    if (end <= first_selected_op_) num_token_phases_ = phases_.size();
  }
}

void Executor::step(const StepInput& step, StepOutput& output) {
  last_clock_ = std::chrono::steady_clock::now();
  check_step(step, limits_);
  prepare(step);
  output.samples.resize(step.samples.size());
  output.scores.resize(step.scores.size());
  for (size_t i = 0; i < step.scores.size(); ++i) output.scores[i].resize(step.scores[i].targets.size());
  team_.run_chunks([&](int thread) { run(step, output, thread); });
}

void Executor::prepare(const StepInput& step) {
  for (size_t i = 0; i < schedules_.size(); ++i) {
    if (schedules_[i] != nullptr) schedules_[i]->build(batch_of(step, int(i / 2)), config_.block_size);
  }
  if (reads_sparsely_) find_whole_tiles(step);
  questions_.clear();
  for (size_t i = 0; i < step.samples.size(); ++i) {
    questions_.push_back({step.samples[i].logits_row, int32_t(i), -1});
  }
  for (size_t i = 0; i < step.scores.size(); ++i) {
    for (size_t j = 0; j < step.scores[i].targets.size(); ++j) {
      questions_.push_back({step.scores[i].first_logits_row + int32_t(j), int32_t(i), int32_t(j)});
    }
  }
  std::sort(questions_.begin(), questions_.end(),
            [](const Question& a, const Question& b) { return a.logits_row < b.logits_row; });
}

// Tiles whose last token is of this step: their keys are all there once the step has stored its own.
void Executor::find_whole_tiles(const StepInput& step) {
  whole_tiles_.clear();
  for (int request = 0; request < step.num_requests(); ++request) {
    const int start = step.start_positions[size_t(request)];
    const int end = start + step.query_offsets[size_t(request) + 1] - step.query_offsets[size_t(request)];
    for (int tile = start / kTileTokens; (tile + 1) * kTileTokens <= end; ++tile)
      whole_tiles_.push_back({request, tile});
  }
}

void Executor::bound_tiles(const StepInput& step, const Op& op, int thread) {
  const KvLayout& layout = layouts_[size_t(op.layer)];
  const TableView& table = step.tables[size_t(sizes_.layer_groups[size_t(op.layer)])];
  team_.for_chunks(thread, int64_t(whole_tiles_.size()), [&](int64_t chunk) {
    const auto [request, tile] = whole_tiles_[size_t(chunk)];
    const int position = tile * kTileTokens;
    const int32_t block = table.block_ids[size_t(table.offsets[size_t(request)] + position / layout.block_size)];
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      kernels_.bound_tile(layout,
                          pool_.data() + layout.keys_offset(block, head, position % layout.block_size / kTileTokens));
    }
  });
}

void Executor::clock(int thread, double& counter) {
  if (!config_.is_timed || thread != 0) return;
  const auto now = std::chrono::steady_clock::now();
  counter += std::chrono::duration<double>(now - last_clock_).count();
  last_clock_ = now;
}

void Executor::run(const StepInput& step, StepOutput& output, int thread) {
  if (config_.poison) poison(step, thread);
  copy_blocks(step, thread);
  clock(thread, seconds_.prepare);
  for (size_t i = 0; i < num_token_phases_; ++i) run_phase(step, phases_[i], {step.num_tokens(), 0}, thread);
  for (int first = 0; first < step.num_selected(); first += config_.max_num_selected) {
    const Rows tile{std::min(config_.max_num_selected, step.num_selected() - first), first};
    for (size_t i = num_token_phases_; i < phases_.size(); ++i) run_phase(step, phases_[i], tile, thread);
    answer(step, tile, output, thread);
    clock(thread, seconds_.sample);
  }
}

void Executor::poison(const StepInput& step, int thread) {
  const int64_t num_parts = team_.size();
  team_.for_chunks(thread, num_parts, [&](int64_t part) {
    const Share bytes = share_of(program_.arena_bytes, num_parts, part);
    std::memset(arena_.get() + bytes.begin, 0xff, size_t(bytes.end - bytes.begin));
    const Share blocks = share_of(int64_t(step.new_blocks.size()), num_parts, part);
    for (int64_t i = blocks.begin; i < blocks.end; ++i) pool_.poison(step.new_blocks[size_t(i)]);
  });
}

// A copy is cut into pieces, so that the team shares the copying of one block, too.
void Executor::copy_blocks(const StepInput& step, int thread) {
  constexpr int64_t kPieceBytes = 32 << 10;
  const int64_t block_bytes = int64_t(pool_.block_bytes());
  const int64_t num_pieces = (block_bytes + kPieceBytes - 1) / kPieceBytes;
  team_.for_chunks(thread, int64_t(step.copies.size()) * num_pieces, [&](int64_t chunk) {
    const BlockCopy& copy = step.copies[size_t(chunk / num_pieces)];
    const int64_t offset = chunk % num_pieces * kPieceBytes;
    std::memcpy(pool_.block(copy.destination) + offset, pool_.block(copy.source) + offset,
                size_t(std::min(kPieceBytes, block_bytes - offset)));
  });
}

void Executor::prepare_row(const StepInput& step, int row) {
  const auto after = std::upper_bound(step.query_offsets.begin(), step.query_offsets.end(), row);
  const size_t request = size_t(after - step.query_offsets.begin()) - 1;
  const int position = step.start_positions[request] + row - step.query_offsets[request];
  row_positions_[size_t(row)] = position;
  row_places_[size_t(row)] = position % config_.block_size;
  for (size_t group = 0; group < row_blocks_.size(); ++group) {
    const TableView& table = step.tables[group];
    row_blocks_[group][size_t(row)] = table.block_ids[size_t(table.offsets[request] + position / config_.block_size)];
  }
  const size_t first = size_t(row) * size_t(sizes_.rotary_dim / 2);
  turn(position, sizes_.inverse_frequencies, sizes_.attention_scaling, cosines_.data() + first, sines_.data() + first);
  turn(position, sizes_.local_frequencies, sizes_.local_scaling, local_cosines_.data() + first,
       local_sines_.data() + first);
}

void Executor::run_phase(const StepInput& step, const Phase& phase, Rows rows, int thread) {
  const Op& first = program_.ops[phase.begin];
  if (phase.kind == OpKind::attend) {
    attend(step, first, thread);
  } else if (phase.kind == OpKind::linear) {
    linear_run(*program_.linears[size_t(first.weight)], data(first.x), stride(first.x), rows.count, data(first.out),
               stride(first.out), shared_scratch_.get(), thread_scratch_[size_t(thread)].get(), team_, thread);
  } else if (phase.kind == OpKind::route) {
    route(first, rows, thread);
  } else if (phase.kind == OpKind::expert_linear) {
    multiply_experts(first, thread);
  } else {
    const int64_t num_chunks = num_chunks_of(rows.count, team_.size());
    team_.for_chunks(thread, num_chunks, [&](int64_t chunk) {
      const Share part = share_of(rows.count, num_chunks, chunk);
      for (int row = int(part.begin); row < int(part.end); ++row) {
        if (phase.begin == 0) prepare_row(step, row);
        for (size_t i = phase.begin; i < phase.end; ++i) run_row(step, program_.ops[i], rows, row);
      }
    });
  }
  clock(thread, seconds_.ops[int(phase.kind)]);
}

void Executor::run_row(const StepInput& step, const Op& op, Rows rows, int row) {
  float* x = op.x < 0 ? nullptr : data(op.x) + row * stride(op.x);
  float* out = op.out < 0 ? nullptr : data(op.out) + row * stride(op.out);
  const bool is_lookup = op.kind == OpKind::embed || op.kind == OpKind::embed_position;
  const float* vector = is_lookup || op.weight < 0 ? nullptr : program_.vectors[size_t(op.weight)].data();
  switch (op.kind) {
    case OpKind::embed:
      return embed_rows(*program_.linears[size_t(op.weight)], &step.token_ids[size_t(row)], 1, op.value, out,
                        stride(op.out));
    case OpKind::embed_position:
      return embed_rows(*program_.linears[size_t(op.weight)], &row_positions_[size_t(row)], 1, 1.0f, out,
                        stride(op.out));
    case OpKind::layer_norm:
      return kernels_.layer_norm(x, vector, program_.vectors[size_t(op.bias)].data(), out,
                                 program_.buffers[size_t(op.x)].width, op.value);
    case OpKind::rms_norm:
      return kernels_.rms_norm(x, vector, out, program_.buffers[size_t(op.x)].width, op.value);
    case OpKind::head_rms_norm:
      for (int head = 0; head < op.num_heads; ++head) {
        float* at = x + op.offset + head * op.head_dim;
        kernels_.rms_norm(at, vector, at, op.head_dim, op.value);
      }
      return;
    case OpKind::rope_store:
      return rope_store(op, row);
    case OpKind::add:
      return kernels_.add(x, out, program_.buffers[size_t(op.x)].width);
    case OpKind::activate: {
      const int width = program_.buffers[size_t(op.out)].width / op.num_parts;
      for (int part = 0; part < op.num_parts; ++part) {
        kernels_.activate(x + part * (op.has_gate ? 2 : 1) * width, out + part * width, width, op.activation,
                          op.has_gate);
      }
      return;
    }
    case OpKind::soft_cap:
      return kernels_.soft_cap(x, program_.buffers[size_t(op.x)].width, op.value);
    case OpKind::combine:
      return combine_row(op, row);
    case OpKind::select_rows:
      std::copy_n(data(op.x) + step.selected_rows[size_t(rows.first + row)] * stride(op.x),
                  program_.buffers[size_t(op.out)].width, out);
      return;
    case OpKind::linear:
    case OpKind::attend:
    case OpKind::route:
    case OpKind::expert_linear:
      return;  // phases of their own
  }
}

void Executor::route(const Op& op, Rows rows, int thread) {
  const int64_t num_chunks = num_chunks_of(rows.count, team_.size());
  team_.for_chunks(thread, num_chunks, [&](int64_t chunk) {
    const Share part = share_of(rows.count, num_chunks, chunk);
    for (int row = int(part.begin); row < int(part.end); ++row) route_row(op, row);
  });
  team_.for_chunks(thread, 1, [&](int64_t) { sort_routes(op, rows); });
}

// Chooses the experts of a row one after the other: highest score first, the lower id where scores are equal.
void Executor::route_row(const Op& op, int row) {
  const int num_experts = program_.buffers[size_t(op.x)].width;
  const float* scores = data(op.x) + row * stride(op.x);
  float* ids = data(op.out) + row * stride(op.out);
  float* weights = ids + op.num_active;
  const float highest = *std::max_element(scores, scores + num_experts);
  const auto share = [&](int expert) { return std::exp(double(scores[expert]) - double(highest)); };
  double total = 0;
  for (int place = 0; place < op.num_active; ++place) {
    int best = -1;
    for (int expert = 0; expert < num_experts; ++expert) {
      const bool is_taken = std::find(ids, ids + place, float(expert)) != ids + place;
      if (!is_taken && (best < 0 || scores[expert] > scores[best])) best = expert;
    }
    ids[place] = float(best);
    total += share(best);
  }
  if (!op.is_normalised) {
    total = 0;
    for (int expert = 0; expert < num_experts; ++expert) total += share(expert);
  }
  for (int place = 0; place < op.num_active; ++place) weights[place] = float(share(int(ids[place])) / total);
}

void Executor::sort_routes(const Op& op, Rows rows) {
  Routing& routing = routings_[routing_of_op_[size_t(&op - program_.ops.data())]];
  const auto expert_of = [&](int slot) {
    return size_t(data(op.out)[slot / op.num_active * stride(op.out) + slot % op.num_active]);
  };
  const int num_slots = rows.count * op.num_active;
  std::fill(routing.offsets.begin(), routing.offsets.end(), 0);
  for (int slot = 0; slot < num_slots; ++slot) ++routing.offsets[expert_of(slot) + 1];
  for (size_t i = 1; i < routing.offsets.size(); ++i) routing.offsets[i] += routing.offsets[i - 1];
  for (int slot = num_slots; slot-- > 0;) {
    // Filled from behind, each expert's end moves to its begin; what was its end is the next one's begin.
    routing.slots[size_t(--routing.offsets[expert_of(slot) + 1])] = slot;
  }
  std::rotate(routing.offsets.begin(), routing.offsets.begin() + 1, routing.offsets.end());
  routing.offsets.back() = num_slots;
}

// Expert by expert: collects the rows that go to it, multiplies them together, and puts the results in their places.
void Executor::multiply_experts(const Op& op, int thread) {
  const Routing& routing = routings_[routing_of_op_[size_t(&op - program_.ops.data())]];
  const int in_width = program_.buffers[size_t(op.gathered)].width;
  const int out_width = program_.buffers[size_t(op.product)].width;
  const auto part_of = [&](int buffer, int slot, int width, bool is_split) {
    return data(buffer) + slot / op.num_active * stride(buffer) + (is_split ? slot % op.num_active * width : 0);
  };
  for (size_t expert = 0; expert < op.experts.size(); ++expert) {
    const int32_t* slots = routing.slots.data() + routing.offsets[expert];
    const int count = routing.offsets[expert + 1] - routing.offsets[expert];
    if (count == 0) continue;
    const int64_t num_chunks = num_chunks_of(count, team_.size());
    team_.for_chunks(thread, num_chunks, [&](int64_t chunk) {
      const Share part = share_of(count, num_chunks, chunk);
      for (int64_t i = part.begin; i < part.end; ++i) {
        std::copy_n(part_of(op.x, slots[i], in_width, op.is_split), in_width,
                    data(op.gathered) + i * stride(op.gathered));
      }
    });
    linear_run(*program_.linears[size_t(op.experts[expert])], data(op.gathered), stride(op.gathered), count,
               data(op.product), stride(op.product), shared_scratch_.get(), thread_scratch_[size_t(thread)].get(),
               team_, thread);
    team_.for_chunks(thread, num_chunks, [&](int64_t chunk) {
      const Share part = share_of(count, num_chunks, chunk);
      for (int64_t i = part.begin; i < part.end; ++i) {
        std::copy_n(data(op.product) + i * stride(op.product), out_width, part_of(op.out, slots[i], out_width, true));
      }
    });
  }
}

void Executor::combine_row(const Op& op, int row) {
  const int width = program_.buffers[size_t(op.out)].width;
  const float* x = data(op.x) + row * stride(op.x);
  const float* weights = data(op.routes) + row * stride(op.routes) + op.num_active;
  float* out = data(op.out) + row * stride(op.out);
  // Products and sums are rounded one by one, in the order of the places, as in the reference.
  for (int i = 0; i < width; ++i) {
    float total = 0.0f;
    for (int place = 0; place < op.num_active; ++place) total += weights[place] * x[place * width + i];
    out[i] = total;
  }
}

void Executor::rope_store(const Op& op, int row) {
  const int head_dim = sizes_.head_dim;
  const int half = sizes_.rotary_dim / 2;
  float* qkv = data(op.x) + row * stride(op.x);
  const float* cosines = (op.is_local ? local_cosines_ : cosines_).data() + int64_t(row) * half;
  const float* sines = (op.is_local ? local_sines_ : sines_).data() + int64_t(row) * half;
  float* sink_q = op.sink_q < 0 ? nullptr : data(op.sink_q) + row * stride(op.sink_q);
  if (sink_q != nullptr) {
    std::copy_n(qkv, sizes_.num_heads * head_dim, sink_q);
    for (int head = 0; head < sizes_.num_heads; ++head) {
      kernels_.rotate(sink_q + head * head_dim, sink_cosines_.data(), sink_sines_.data(), half);
    }
  }
  // Keys follow queries, so both are rotated in one sweep.
  for (int head = 0; head < sizes_.num_heads + sizes_.num_kv_heads; ++head) {
    kernels_.rotate(qkv + head * head_dim, cosines, sines, half);
  }
  const KvLayout& layout = layouts_[size_t(op.layer)];
  if (is_transformed(layout.type)) {
    for (int head = 0; head < sizes_.num_heads + 2 * sizes_.num_kv_heads; ++head) {
      const auto transform = head < sizes_.num_heads ? kernels_.hadamard_inverse : kernels_.hadamard;
      transform(qkv + head * head_dim, head_dim);
    }
    for (int head = 0; sink_q != nullptr && head < sizes_.num_heads; ++head) {
      kernels_.hadamard_inverse(sink_q + head * head_dim, head_dim);
    }
  }
  const size_t group = size_t(sizes_.layer_groups[size_t(op.layer)]);
  const int place = row_places_[size_t(row)];
  const float* keys = qkv + sizes_.num_heads * head_dim;
  const float* values = keys + sizes_.num_kv_heads * head_dim;
  for (int head = 0; head < sizes_.num_kv_heads; ++head) {
    std::byte* tile = pool_.data() + layout.keys_offset(row_blocks_[group][size_t(row)], head, place / kTileTokens);
    kernels_.store_kv(layout, tile, place % kTileTokens, keys + head * head_dim, values + head * head_dim);
  }
}

AttentionBatch Executor::batch_of(const StepInput& step, int group) const {
  const TableView& table = step.tables[size_t(group)];
  return {step.num_requests(), step.query_offsets.data(), step.start_positions.data(), table.block_ids.data(),
          table.offsets.data()};
}

std::unique_ptr<AttentionSchedule>& Executor::schedule_of(const Op& op) {
  return schedules_[2 * size_t(sizes_.layer_groups[size_t(op.layer)]) + (op.sparse_tiles > 0 ? 1 : 0)];
}

void Executor::attend(const StepInput& step, const Op& op, int thread) {
  const AttentionCall call{
      .shape = {sizes_.num_heads, sizes_.num_kv_heads, sizes_.head_dim, op.window, op.num_sinks},
      .batch = batch_of(step, sizes_.layer_groups[size_t(op.layer)]),
      .scale = op.value,
      .sparse_tiles = op.sparse_tiles,
      .softcap = op.softcap,
      .q = data(op.x),
      .q_stride = stride(op.x),
      .out = data(op.out),
      .out_stride = stride(op.out),
      .pool = pool_.data(),
      .layout = layouts_[size_t(op.layer)],
      .sink_q = op.sink_q < 0 ? nullptr : data(op.sink_q),
      .sink_q_stride = op.sink_q < 0 ? 0 : stride(op.sink_q),
  };
  if (op.sparse_tiles > 0) bound_tiles(step, op, thread);
  AttentionSchedule& schedule = *schedule_of(op);
  team_.for_chunks(thread, schedule.num_items(), [&](int64_t index) {
    attend_(call, schedule, schedule.item(index), reinterpret_cast<float*>(thread_scratch_[size_t(thread)].get()));
  });
}

void Executor::answer(const StepInput& step, Rows rows, StepOutput& output, int thread) {
  const float* logits = data(program_.logits);
  const int64_t logits_stride = stride(program_.logits);
  const auto is_before = [](const Question& question, int row) { return question.logits_row < row; };
  const auto begin = std::lower_bound(questions_.begin(), questions_.end(), rows.first, is_before);
  const auto end = std::lower_bound(begin, questions_.end(), rows.first + rows.count, is_before);
  team_.for_chunks(thread, end - begin, [&](int64_t chunk) {
    const Question& question = begin[chunk];
    const float* row = logits + (question.logits_row - rows.first) * logits_stride;
    const size_t index = size_t(question.index);
    Sampler& sampler = samplers_[size_t(thread)];
    if (question.place < 0) {
      sampler.sample(row, step.samples[index], output.samples[index]);
    } else {
      const size_t place = size_t(question.place);
      const ScoreRequest& score = step.scores[index];
      sampler.score(row, score.targets[place], score.num_top, output.scores[index][place]);
    }
  });
}

}  // namespace octavo
