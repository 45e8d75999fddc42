// Choosing tokens from logits, and log-probabilities. The definition is octavo/runtime/sampler.py, matched bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels.h"

namespace octavo {

// One token to choose; `logits_row` counts the selected rows of the step. Ids are in the vocabulary.
struct SampleRequest {
  int32_t logits_row;
  int32_t position;
  int64_t seed;
  double temperature;  // 0: greedy
  double top_p;
  int32_t top_k;  // 0 or -1: all
  double min_p;
  double repetition_penalty;
  double presence_penalty;
  double frequency_penalty;
  int32_t num_logprobs;  // -1: none wanted
  std::vector<int32_t> banned;
  std::vector<std::pair<int32_t, double>> bias;
  std::span<const int32_t> prompt;
  std::span<const int32_t> output;

  bool has_penalties() const {
    return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
  }
};

constexpr int32_t kNoToken = -1;  // the logits are no distribution: a NaN, +inf, or nothing above -inf

struct TokenLogprobs {
  int32_t token_id;  // kNoToken when the logits are no distribution
  double logprob;
  int32_t rank;
  std::vector<std::pair<int32_t, double>> top;
};

struct SampleAnswer {
  int32_t token_id;  // kNoToken when the logits are no distribution, or every token is banned
  bool has_logprobs;
  TokenLogprobs logprobs;
};

// One thread's sampler; owns the scratch it needs.
class Sampler {
 public:
  Sampler(const SampleKernels& kernels, int vocab_size);

  void sample(const float* logits, const SampleRequest& request, SampleAnswer& answer);
  void score(const float* logits, int32_t token_id, int num_top, TokenLogprobs& answer);
  size_t resident_bytes() const;

 private:
  int32_t choose(const float* logits, float highest_logit, const SampleRequest& request);
  void adjust(const float* logits, const SampleRequest& request);
  void penalise(const SampleRequest& request);
  int32_t draw(const SampleRequest& request, double highest);
  void order_top(const double* scores, const double* weights, int count);
  void keep(int count);

  const SampleKernels* kernels_;
  int vocab_size_;
  std::vector<double> scores_;      // adjusted logits
  std::vector<double> weights_;     // 0: dropped
  std::vector<double> block_tops_;  // highest score of each block of ids
  std::vector<int32_t> ids_;        // in canonical order: score descending, ties by id
  std::vector<int32_t> num_seen_;   // zero between calls
};

}  // namespace octavo
