#include "step.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("step plan: " + message); }

void check_length(const std::string& name, size_t length, const std::string& dimension, int64_t expected) {
  if (int64_t(length) == expected) return;
  refuse(name + " has length " + std::to_string(length) + ", expected " + dimension + " = " + std::to_string(expected));
}

void check_at_most(const std::string& dimension, int64_t value, const std::string& limit, int64_t most) {
  if (value <= most) return;
  refuse(dimension + " = " + std::to_string(value) + " is more than " + limit + " = " + std::to_string(most));
}

// Offsets start at 0, never fall, and end at `total`.
void check_offsets(const std::string& name, Ints offsets, const std::string& dimension, int64_t total) {
  if (offsets.front() != 0) refuse(name + "[0] is " + std::to_string(offsets.front()) + ", expected 0");
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) refuse(name + " falls at index " + std::to_string(i));
  }
  if (offsets.back() != total) {
    refuse(name + " ends at " + std::to_string(offsets.back()) + ", expected " + dimension + " = " +
           std::to_string(total));
  }
}

// `index` >= 0 is printed after the name. Called for every number of a step, so text is made only when it is needed.
void check_range(const char* name, int64_t index, int64_t value, int64_t first, int64_t last) {
  if (value >= first && value <= last) return;
  std::string text = name;
  if (index >= 0) text.append("[").append(std::to_string(index)).append("]");
  text.append(" is ").append(std::to_string(value)).append(", expected ").append(std::to_string(first));
  refuse(text.append(" to ").append(std::to_string(last)));
}

void check_table(const StepInput& step, const StepLimits& limits, size_t group) {
  const std::string name = "tables[" + std::to_string(group) + "]";
  const TableView& table = step.tables[group];
  check_length(name + ".offsets", table.offsets.size(), "num_requests + 1", step.num_requests() + 1);
  check_offsets(name + ".offsets", table.offsets, "num_block_ids", int64_t(table.block_ids.size()));
  const int window = limits.windows[group];
  const int num_sinks = limits.num_sinks[group];
  for (size_t r = 0; r < step.start_positions.size(); ++r) {
    const int num_queries = step.query_offsets[r + 1] - step.query_offsets[r];
    if (num_queries == 0) continue;
    const int64_t end = int64_t(step.start_positions[r]) + num_queries;
    const int64_t first = step.start_positions[r];
    const int64_t begin = window == 0 || first < int64_t(num_sinks) + window ? 0 : first - window + 1;
    const int64_t num_blocks = table.offsets[r + 1] - table.offsets[r];
    if (num_blocks * limits.block_size < end) {
      refuse(name + " holds " + std::to_string(num_blocks) + " blocks of " + std::to_string(limits.block_size) +
             " tokens for request " + std::to_string(r) + ", whose context is " + std::to_string(end) + " tokens");
    }
    const auto check_blocks = [&](int64_t first_block, int64_t last_block) {
      for (int64_t i = first_block; i <= last_block; ++i) {
        const int64_t index = table.offsets[r] + i;
        check_range("tables block_ids", index, table.block_ids[size_t(index)], 1, limits.num_blocks);
      }
    };
    if (begin > 0 && num_sinks > 0) check_blocks(0, (num_sinks - 1) / limits.block_size);
    check_blocks(begin / limits.block_size, (end - 1) / limits.block_size);
  }
}

void check_sample_ids(const SampleRequest& sample, int last_id) {
  for (const auto& [id, bias] : sample.bias) check_range("samples logit_bias id", -1, id, 0, last_id);
  for (const int32_t id : sample.banned) check_range("samples banned id", -1, id, 0, last_id);
  for (const int32_t id : sample.prompt) check_range("samples prompt id", -1, id, 0, last_id);
  for (const int32_t id : sample.output) check_range("samples output id", -1, id, 0, last_id);
}

void check_answers(const StepInput& step, const StepLimits& limits) {
  const int num_selected = step.num_selected();
  for (int i = 0; i < num_selected; ++i) {
    const int first = i == 0 ? 0 : step.selected_rows[size_t(i - 1)] + 1;
    check_range("selected_rows", i, step.selected_rows[size_t(i)], first, step.num_tokens() - 1);
  }
  for (size_t i = 0; i < step.samples.size(); ++i) {
    check_range("samples logits_row", int64_t(i), step.samples[i].logits_row, 0, num_selected - 1);
    check_sample_ids(step.samples[i], limits.num_logits - 1);
    const size_t num_words = step.samples[i].allowed.size();
    if (num_words > 0)
      check_length("samples allowed", num_words, "ceil(num_logits / 32)", (limits.num_logits + 31) / 32);
  }
  for (size_t i = 0; i < step.scores.size(); ++i) {
    const ScoreRequest& score = step.scores[i];
    const int64_t last_first = num_selected - int64_t(score.targets.size());
    check_range("prompt_logprobs first_logits_row", int64_t(i), score.first_logits_row, 0, last_first);
    for (const int32_t target : score.targets) {
      check_range("prompt_logprobs target", int64_t(i), target, 0, limits.num_logits - 1);
    }
  }
}

}  // namespace

void check_step(const StepInput& step, const StepLimits& limits) {
  check_at_most("num_requests", step.num_requests(), "max_num_seqs", limits.max_num_requests);
  check_at_most("num_tokens", step.num_tokens(), "max_num_batched_tokens", limits.max_num_tokens);
  check_length("query_offsets", step.query_offsets.size(), "num_requests + 1", step.num_requests() + 1);
  check_offsets("query_offsets", step.query_offsets, "num_tokens", step.num_tokens());
  for (size_t i = 0; i < step.token_ids.size(); ++i) {
    check_range("token_ids", int64_t(i), step.token_ids[i], 0, limits.vocab_size - 1);
  }
  for (const int32_t start : step.start_positions) check_range("start_positions", -1, start, 0, INT32_MAX - 1);
  check_length("tables", step.tables.size(), "num_groups", int64_t(limits.windows.size()));
  for (size_t group = 0; group < step.tables.size(); ++group) check_table(step, limits, group);
  for (const BlockCopy& copy : step.copies) {
    check_range("copies source", -1, copy.source, 1, limits.num_blocks);
    check_range("copies destination", -1, copy.destination, 1, limits.num_blocks);
  }
  for (const int32_t id : step.new_blocks) check_range("new_blocks", -1, id, 1, limits.num_blocks);
  check_answers(step, limits);
}

}  // namespace octavo
