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
  std::span<const uint32_t> allowed;  // a bit per id, those of 0 to 31 in the first word; empty: all may be chosen

  bool has_penalties() const {
    return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
  }
  bool is_adjusted() const { return !allowed.empty() || !bias.empty() || !banned.empty() || has_penalties(); }
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
//
// The definition sorts and sums whole rows; this does as little of that as gives the same bits. What survives a filter
// is a short list of ids with their weights (`ids_`, `kept_`), or, where nothing filters, a weight per id.
class Sampler {
 public:
  Sampler(const SampleKernels& kernels, int vocab_size);

  void sample(const float* logits, const SampleRequest& request, SampleAnswer& answer);
  void score(const float* logits, int32_t token_id, int num_top, TokenLogprobs& answer);
  size_t resident_bytes() const;

 private:
  // The adjusted logits of a row: `scores_`, or the logits themselves, less `subtracted`, where nothing was adjusted.
  struct Scores {
    const float* logits;  // null: `scores_`
    double subtracted;
  };

  int32_t choose(const float* logits, float highest_logit, const SampleRequest& request);
  void adjust(const float* logits, const SampleRequest& request);
  void keep_allowed(std::span<const uint32_t> allowed);
  void penalise(const SampleRequest& request);
  int32_t draw(const Scores& scores, const SampleRequest& request, const Temper& temper);
  void keep_top_k(const Scores& scores, int top_k, const Temper& temper);
  void keep_top_p(const Scores& scores, double target);
  bool keep_top_p_of_row(const Scores& scores, double top_p, const Temper& temper);
  int32_t draw_from_row(double total, double u) const;
  int32_t draw_from_kept(double u) const;

  double score_at(const Scores& scores, int32_t id) const {
    return scores.logits == nullptr ? scores_[size_t(id)] : double(scores.logits[id]) - scores.subtracted;
  }
  void find_block_tops(const Scores& scores);
  void gather(const Scores& scores, double least);
  void gather_top(const Scores& scores, int count);
  void order(const Scores& scores, int count);
  double weigh_row(const Scores& scores, const Temper& temper);
  void weigh_kept(const Scores& scores, const Temper& temper);
  void drop_weightless();
  double lane_sum_of_kept() const;

  const SampleKernels* kernels_;
  int vocab_size_;
  std::vector<double> scores_;      // adjusted logits
  std::vector<double> weights_;     // by id; once ids are kept, of those alone
  std::vector<double> runs_;        // sum of the weights before each run of ids
  std::vector<double> block_tops_;  // highest score of each block of ids
  std::vector<double> gathered_;    // scores of `kept_`, side by side
  std::vector<int32_t> kept_;
  std::vector<int32_t> num_seen_;  // zero between calls
};

}  // namespace octavo
