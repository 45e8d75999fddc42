// One step as the executor sees it: views of the arrays of a StepPlan, and the answers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampler.h"

namespace octavo {

using Ints = std::span<const int32_t>;

struct TableView {
  Ints block_ids;
  Ints offsets;
};

struct BlockCopy {
  int32_t source;
  int32_t destination;
};

// Prompt tokens to score: logits row `first_logits_row + i` against `targets[i]`.
struct ScoreRequest {
  int32_t first_logits_row;
  int32_t num_top;
  Ints targets;
};

struct StepInput {
  Ints query_offsets;
  Ints start_positions;
  Ints token_ids;
  std::vector<TableView> tables;
  std::vector<BlockCopy> copies;
  Ints new_blocks;
  Ints selected_rows;
  std::vector<SampleRequest> samples;
  std::vector<ScoreRequest> scores;

  int num_requests() const { return int(start_positions.size()); }
  int num_tokens() const { return int(token_ids.size()); }
  int num_selected() const { return int(selected_rows.size()); }
};

struct StepOutput {
  std::vector<SampleAnswer> samples;               // one per sample
  std::vector<std::vector<TokenLogprobs>> scores;  // one list per score request
};

// Limits a step must keep, and what its ids may be.
struct StepLimits {
  int max_num_tokens;
  int max_num_requests;
  int vocab_size;  // ids that can be embedded
  int num_logits;  // ids that can be sampled: the same in any whole model
  int block_size;
  int64_t num_blocks;
  std::vector<int> windows;    // of each KV group, 0 for none
  std::vector<int> num_sinks;  // of each KV group: first tokens that stay visible beside the window
};

// Throws std::invalid_argument naming the array and the dimension that disagree.
void check_step(const StepInput& step, const StepLimits& limits);

}  // namespace octavo
