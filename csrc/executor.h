// Runs step after step of one model: one call, one team of threads, no allocation.
//
// Ops are joined to phases, each done before the next begins: a product, an attention, or a run of ops that compute
// each row from that row alone (those go row by row through all ops of the phase). A phase is cut into chunks that
// threads claim as they come; see team.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aligned.h"
#include "attention_schedule.h"
#include "kernels.h"
#include "kv_pool.h"
#include "program.h"
#include "sampler.h"
#include "step.h"
#include "team.h"

namespace octavo {

struct ExecutorConfig {
  int64_t num_blocks;  // usable ones; the null block comes on top
  int block_size;
  std::vector<KvType> kv_types;      // by layer
  std::vector<bool> bounded_layers;  // by layer: whether tiles keep bounds, for sparse reading
  int max_num_tokens;                // rows of a step
  int max_num_requests;              // of a step
  int max_num_selected;              // rows of a logits tile: more selected rows are computed tile after tile
  int num_threads;
  Isa isa;
  bool may_widen = true;  // a wider instruction set may be used where it gives the same bits
  bool prefault;
  bool poison;            // fill new blocks and all activations with NaN before each step
  bool is_timed = false;  // add up the seconds of each kind of op
};

// Seconds that thread 0 spent on each kind of op since the executor was made, waiting for other threads included.
struct StepSeconds {
  double ops[kNumOpKinds] = {};
  double prepare = 0;
  double sample = 0;
};

class Executor {
 public:
  Executor(Program program, ModelSizes sizes, ExecutorConfig config);

  // Checks the step and executes it. `output` is reused. Throws std::invalid_argument for a plan that contradicts
  // itself or the limits; nothing has been computed then.
  void step(const StepInput& step, StepOutput& output);

  KvPool& pool() { return pool_; }
  const KvLayout& layout(int layer) const { return layouts_[size_t(layer)]; }
  const ModelSizes& sizes() const { return sizes_; }
  const ExecutorConfig& config() const { return config_; }
  const Program& program() const { return program_; }
  // A buffer of the last step, as far as later ops have left it alone (tests).
  const float* buffer(int index) const { return data(index); }
  size_t scratch_bytes() const;
  // Pieces of attention of the last step in which several requests visited the same blocks together, per layer.
  size_t num_shared_items() const;
  const StepSeconds& seconds() const { return seconds_; }

 private:
  // Consecutive ops done as one.
  struct Phase {
    OpKind kind;  // of its first op: linear, attend, or one of the row-wise kinds
    size_t begin;
    size_t end;
  };
  struct Rows {
    int count;
    int first;  // of the selected rows: the tile starts here; 0 for token rows
  };
  // A token to choose or to score.
  struct Question {
    int32_t logits_row;
    int32_t index;  // of the sample, or of the score request
    int32_t place;  // within the score request; -1 for a sample
  };

  // Which rows go to which expert: slots (row * num_active + place) sorted by expert. Each Route op of a step has its
  // own, so that a thread that comes late finds what it missed as it was.
  struct Routing {
    std::vector<int32_t> offsets;  // [num_experts + 1]
    std::vector<int32_t> slots;
  };

  void find_phases();
  void prepare(const StepInput& step);
  void find_whole_tiles(const StepInput& step);
  void bound_tiles(const StepInput& step, const Op& op, int thread);
  void run(const StepInput& step, StepOutput& output, int thread);
  void poison(const StepInput& step, int thread);
  void copy_blocks(const StepInput& step, int thread);
  void prepare_row(const StepInput& step, int row);
  void run_phase(const StepInput& step, const Phase& phase, Rows rows, int thread);
  void run_row(const StepInput& step, const Op& op, Rows rows, int row);
  void rope_store(const Op& op, int row);
  void attend(const StepInput& step, const Op& op, int thread);
  void route(const Op& op, Rows rows, int thread);
  void route_row(const Op& op, int row);
  void sort_routes(const Op& op, Rows rows);
  void multiply_experts(const Op& op, int thread);
  void combine_row(const Op& op, int row);
  void answer(const StepInput& step, Rows rows, StepOutput& output, int thread);
  AttentionBatch batch_of(const StepInput& step, int group) const;
  std::unique_ptr<AttentionSchedule>& schedule_of(const Op& op);
  // Adds the time since the last call to a counter, on thread 0 and if asked for.
  void clock(int thread, double& counter);

  float* data(int buffer) const {
    return reinterpret_cast<float*>(arena_.get() + program_.buffers[size_t(buffer)].offset_bytes);
  }
  int64_t stride(int buffer) const { return program_.buffers[size_t(buffer)].stride; }

  const Program program_;
  const ModelSizes sizes_;
  const ExecutorConfig config_;
  const Kernels& kernels_;
  const AttendFunction attend_;
  StepLimits limits_;
  size_t first_selected_op_;
  std::vector<Phase> phases_;
  size_t num_token_phases_ = 0;  // those before rows are selected
  Team team_;
  std::vector<KvLayout> layouts_;  // by layer
  KvPool pool_;

  AlignedBytes arena_;
  AlignedBytes shared_scratch_;
  std::vector<AlignedBytes> thread_scratch_;
  size_t shared_scratch_bytes_ = 0;
  size_t thread_scratch_bytes_ = 0;
  // By KV group, of layers that read all and of layers that read sparsely; null where there are none.
  std::vector<std::unique_ptr<AttentionSchedule>> schedules_;
  std::vector<Sampler> samplers_;  // one per thread

  struct WholeTile {
    int request;
    int tile;
  };
  bool reads_sparsely_ = false;
  std::vector<WholeTile> whole_tiles_;  // of the step

  std::vector<Question> questions_;  // of the step, by logits row

  std::vector<Routing> routings_;      // by Route op
  std::vector<size_t> routing_of_op_;  // of route and expert_linear ops: index into routings_

  // Per row of the step.
  std::vector<int32_t> row_positions_;
  std::vector<int32_t> row_places_;               // place in its block
  std::vector<std::vector<int32_t>> row_blocks_;  // by group: block of the row's slot
  std::vector<float> cosines_;                    // [row][rotary_dim / 2]
  std::vector<float> sines_;
  std::vector<float> local_cosines_;  // empty where no layer has a rotation of its own
  std::vector<float> local_sines_;
  std::vector<float> sink_cosines_;  // of the position where queries that read sinks are rotated
  std::vector<float> sink_sines_;

  StepSeconds seconds_;
  std::chrono::steady_clock::time_point last_clock_;
};

}  // namespace octavo
