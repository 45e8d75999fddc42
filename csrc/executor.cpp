#include "executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace octavo {
namespace {

// Ops that compute each row from that row alone. Between two of them no barrier is needed: a thread has the same rows.
bool is_row_wise(OpKind kind) {
  return kind != OpKind::linear && kind != OpKind::attend && kind != OpKind::select_rows;
}

size_t find_first_selected_op(const Program& program) {
  size_t i = 0;
  while (i < program.ops.size() && program.ops[i].kind != OpKind::select_rows) ++i;
  return i;
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

KvLayout layout_of(const ModelSizes& sizes, const ExecutorConfig& config) {
  int num_layers = 0;
  for (const int index : sizes.layer_indices) num_layers = std::max(num_layers, index + 1);
  return {config.kv_type, num_layers, sizes.num_kv_heads, sizes.head_dim, config.block_size};
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
      pool_(layout_of(sizes_, config), config.num_blocks) {
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
  };
  schedules_.resize(size_t(sizes_.num_groups));
  arena_ = aligned_bytes(size_t(program_.arena_bytes));
  thread_scratch_bytes_ = attention_scratch_floats(sizes_.head_dim) * sizeof(float);
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    const Op& op = program_.ops[i];
    if (op.kind == OpKind::linear) {
      const PackedLinear& linear = *program_.linears[size_t(op.weight)];
      const int rows = i < first_selected_op_ ? max_tokens : config_.max_num_selected;
      shared_scratch_bytes_ = std::max(shared_scratch_bytes_, linear_shared_scratch_bytes(linear, rows));
      thread_scratch_bytes_ = std::max(thread_scratch_bytes_, linear_thread_scratch_bytes(linear, rows));
    } else if (op.kind == OpKind::attend) {
      const size_t group = size_t(sizes_.layer_groups[size_t(op.layer)]);
      limits_.windows[group] = op.window;
      if (schedules_[group] == nullptr) {
        schedules_[group] = std::make_unique<AttentionSchedule>(
            AttentionShape{sizes_.num_heads, sizes_.num_kv_heads, sizes_.head_dim, op.window}, max_tokens,
            config_.max_num_requests, config_.num_threads);
      }
    }
  }
  shared_scratch_ = aligned_bytes(shared_scratch_bytes_);
  for (int thread = 0; thread < config_.num_threads; ++thread) {
    thread_scratch_.push_back(aligned_bytes(thread_scratch_bytes_));
    samplers_.emplace_back(kernels_.sample, num_logits);
  }
  row_places_.resize(size_t(max_tokens));
  row_blocks_.assign(size_t(sizes_.num_groups), std::vector<int32_t>(size_t(max_tokens)));
  cosines_.resize(size_t(max_tokens) * size_t(sizes_.rotary_dim / 2));
  sines_.resize(cosines_.size());
  if (config_.prefault) pool_.prefault();
}

size_t Executor::scratch_bytes() const {
  size_t bytes = shared_scratch_bytes_ + size_t(config_.num_threads) * thread_scratch_bytes_ +
                 (cosines_.size() + sines_.size()) * sizeof(float) +
                 row_places_.size() * sizeof(int32_t) * size_t(1 + sizes_.num_groups);
  for (const auto& schedule : schedules_) bytes += schedule == nullptr ? 0 : schedule->resident_bytes();
  for (const Sampler& sampler : samplers_) bytes += sampler.resident_bytes();
  return bytes;
}

size_t Executor::num_shared_items() const {
  size_t count = 0;
  for (const auto& schedule : schedules_) count += schedule == nullptr ? 0 : schedule->num_shared_items();
  return count;
}

void Executor::step(const StepInput& step, StepOutput& output) {
  last_clock_ = std::chrono::steady_clock::now();
  check_step(step, limits_);
  prepare(step);
  output.samples.resize(step.samples.size());
  output.scores.resize(step.scores.size());
  for (size_t i = 0; i < step.scores.size(); ++i) output.scores[i].resize(step.scores[i].targets.size());
  team_.run([&](int thread) { run(step, output, thread); });
}

void Executor::clock(int thread, double& counter) {
  if (!config_.is_timed || thread != 0) return;
  const auto now = std::chrono::steady_clock::now();
  counter += std::chrono::duration<double>(now - last_clock_).count();
  last_clock_ = now;
}

void Executor::prepare(const StepInput& step) {
  for (size_t group = 0; group < schedules_.size(); ++group) {
    if (schedules_[group] != nullptr) schedules_[group]->build(batch_of(step, int(group)), config_.block_size);
  }
}

void Executor::run(const StepInput& step, StepOutput& output, int thread) {
  if (config_.poison) {
    const Share part = share_of(program_.arena_bytes, team_.size(), thread);
    std::memset(arena_.get() + part.begin, 0xff, size_t(part.end - part.begin));
    const Share blocks = share_of(int64_t(step.new_blocks.size()), team_.size(), thread);
    for (int64_t i = blocks.begin; i < blocks.end; ++i) pool_.poison(step.new_blocks[size_t(i)]);
    team_.barrier();
  }
  copy_blocks(step, thread);
  prepare_rows(step, thread);
  clock(thread, seconds_.prepare);
  run_ops(step, 0, first_selected_op_, {step.num_tokens(), 0}, thread);
  for (int first = 0; first < step.num_selected(); first += config_.max_num_selected) {
    const Rows tile{std::min(config_.max_num_selected, step.num_selected() - first), first};
    team_.barrier();
    run_ops(step, first_selected_op_, program_.ops.size(), tile, thread);
    team_.barrier();
    answer(step, tile, output, thread);
    clock(thread, seconds_.sample);
  }
}

// A copy is cut by layers, so that the team shares the copying of one block, too. No barrier follows: the first op
// that touches the cache comes after a product.
void Executor::copy_blocks(const StepInput& step, int thread) {
  const KvLayout& layout = pool_.layout();
  const Share part = share_of(int64_t(step.copies.size()) * layout.num_layers, team_.size(), thread);
  for (int64_t i = part.begin; i < part.end; ++i) {
    const BlockCopy& copy = step.copies[size_t(i / layout.num_layers)];
    const size_t offset = size_t(i % layout.num_layers) * layout.layer_bytes();
    std::memcpy(pool_.block(copy.destination) + offset, pool_.block(copy.source) + offset, layout.layer_bytes());
  }
}

void Executor::prepare_rows(const StepInput& step, int thread) {
  const Share part = share_of(step.num_tokens(), team_.size(), thread);
  const int half = sizes_.rotary_dim / 2;
  int request = 0;
  for (int64_t row = part.begin; row < part.end; ++row) {
    while (step.query_offsets[size_t(request) + 1] <= row) ++request;
    const int position = step.start_positions[size_t(request)] + int(row) - step.query_offsets[size_t(request)];
    row_places_[size_t(row)] = position % config_.block_size;
    for (size_t group = 0; group < row_blocks_.size(); ++group) {
      const TableView& table = step.tables[group];
      row_blocks_[group][size_t(row)] =
          table.block_ids[size_t(table.offsets[size_t(request)] + position / config_.block_size)];
    }
    for (int i = 0; i < half; ++i) {
      // In double precision and rounded once, so that every runner has the same bits.
      const double angle = double(position) * sizes_.inverse_frequencies[size_t(i)];
      cosines_[size_t(row * half + i)] = float(std::cos(angle) * sizes_.attention_scaling);
      sines_[size_t(row * half + i)] = float(std::sin(angle) * sizes_.attention_scaling);
    }
  }
}

void Executor::run_ops(const StepInput& step, size_t begin, size_t end, Rows rows, int thread) {
  for (size_t i = begin; i < end; ++i) {
    const Op& op = program_.ops[i];
    if (op.kind == OpKind::attend && thread == 0) schedule_of(op).rewind();
    if (i > begin && !(is_row_wise(op.kind) && is_row_wise(program_.ops[i - 1].kind))) team_.barrier();
    run_op(step, op, rows, thread);
    clock(thread, seconds_.ops[int(op.kind)]);
  }
}

void Executor::run_op(const StepInput& step, const Op& op, Rows rows, int thread) {
  if (op.kind == OpKind::attend) return attend(step, op, thread);
  float* x = op.x < 0 ? nullptr : data(op.x);
  float* out = op.out < 0 ? nullptr : data(op.out);
  const int64_t x_stride = op.x < 0 ? 0 : stride(op.x);
  const int64_t out_stride = op.out < 0 ? 0 : stride(op.out);
  if (op.kind == OpKind::embed) {
    return embed_rows(*program_.linears[size_t(op.weight)], step.token_ids.data(), rows.count, op.value, out,
                      out_stride, team_, thread);
  }
  if (op.kind == OpKind::linear) {
    return linear_run(*program_.linears[size_t(op.weight)], x, x_stride, rows.count, out, out_stride,
                      shared_scratch_.get(), thread_scratch_[size_t(thread)].get(), team_, thread);
  }
  const float* vector = op.weight < 0 ? nullptr : program_.vectors[size_t(op.weight)].data();
  const Share part = share_of(rows.count, team_.size(), thread);
  for (int row = int(part.begin); row < int(part.end); ++row) {
    float* x_row = x + row * x_stride;
    float* out_row = out + row * out_stride;
    switch (op.kind) {
      case OpKind::rms_norm:
        kernels_.rms_norm(x_row, vector, out_row, program_.buffers[size_t(op.x)].width, op.value);
        break;
      case OpKind::head_rms_norm:
        for (int head = 0; head < op.num_heads; ++head) {
          float* at = x_row + op.offset + head * sizes_.head_dim;
          kernels_.rms_norm(at, vector, at, sizes_.head_dim, op.value);
        }
        break;
      case OpKind::rope_store:
        rope_store(op, row);
        break;
      case OpKind::add:
        kernels_.add(x_row, out_row, program_.buffers[size_t(op.x)].width);
        break;
      case OpKind::silu_gated:
        kernels_.silu_gated(x_row, out_row, program_.buffers[size_t(op.out)].width);
        break;
      case OpKind::select_rows:
        std::copy_n(x + step.selected_rows[size_t(rows.first + row)] * x_stride, program_.buffers[size_t(op.out)].width,
                    out_row);
        break;
      default:
        break;
    }
  }
}

void Executor::rope_store(const Op& op, int row) {
  const int head_dim = sizes_.head_dim;
  const int half = sizes_.rotary_dim / 2;
  float* qkv = data(op.x) + row * stride(op.x);
  const float* cosines = cosines_.data() + int64_t(row) * half;
  const float* sines = sines_.data() + int64_t(row) * half;
  // Keys follow queries, so both are rotated in one sweep.
  for (int head = 0; head < sizes_.num_heads + sizes_.num_kv_heads; ++head) {
    kernels_.rotate(qkv + head * head_dim, cosines, sines, half);
  }
  const KvLayout& layout = pool_.layout();
  const size_t group = size_t(sizes_.layer_groups[size_t(op.layer)]);
  const int place = row_places_[size_t(row)];
  const float* keys = qkv + sizes_.num_heads * head_dim;
  const float* values = keys + sizes_.num_kv_heads * head_dim;
  for (int head = 0; head < sizes_.num_kv_heads; ++head) {
    std::byte* tile =
        pool_.data() + layout.keys_offset(row_blocks_[group][size_t(row)], sizes_.layer_indices[size_t(op.layer)], head,
                                          place / kTileTokens);
    kernels_.store_kv(layout, tile, place % kTileTokens, keys + head * head_dim, values + head * head_dim);
  }
}

AttentionBatch Executor::batch_of(const StepInput& step, int group) const {
  const TableView& table = step.tables[size_t(group)];
  return {step.num_requests(), step.query_offsets.data(), step.start_positions.data(), table.block_ids.data(),
          table.offsets.data()};
}

AttentionSchedule& Executor::schedule_of(const Op& op) {
  return *schedules_[size_t(sizes_.layer_groups[size_t(op.layer)])];
}

void Executor::attend(const StepInput& step, const Op& op, int thread) {
  const AttentionCall call{
      .shape = {sizes_.num_heads, sizes_.num_kv_heads, sizes_.head_dim, op.window},
      .batch = batch_of(step, sizes_.layer_groups[size_t(op.layer)]),
      .scale = op.value,
      .q = data(op.x),
      .q_stride = stride(op.x),
      .out = data(op.out),
      .out_stride = stride(op.out),
      .pool = pool_.data(),
      .layout = pool_.layout(),
      .layer = sizes_.layer_indices[size_t(op.layer)],
  };
  attend_(call, schedule_of(op), reinterpret_cast<float*>(thread_scratch_[size_t(thread)].get()));
}

void Executor::answer(const StepInput& step, Rows rows, StepOutput& output, int thread) {
  const float* logits = data(program_.logits);
  const int64_t logits_stride = stride(program_.logits);
  Sampler& sampler = samplers_[size_t(thread)];
  int turn = 0;  // answers of this tile go to the threads in turn
  const auto is_mine = [&](int logits_row) {
    if (logits_row < rows.first || logits_row >= rows.first + rows.count) return false;
    return turn++ % team_.size() == thread;
  };
  for (size_t i = 0; i < step.samples.size(); ++i) {
    const int row = step.samples[i].logits_row;
    if (is_mine(row)) sampler.sample(logits + (row - rows.first) * logits_stride, step.samples[i], output.samples[i]);
  }
  for (size_t i = 0; i < step.scores.size(); ++i) {
    const ScoreRequest& score = step.scores[i];
    for (size_t j = 0; j < score.targets.size(); ++j) {
      const int row = score.first_logits_row + int(j);
      if (!is_mine(row)) continue;
      sampler.score(logits + (row - rows.first) * logits_stride, score.targets[j], score.num_top, output.scores[i][j]);
    }
  }
}

}  // namespace octavo
