#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octavo {
namespace {

constexpr int kBlockIds = 64;    // ids per block when the highest scores are looked for
constexpr int kFirstTopP = 256;  // ids sorted at first for top_p: it rarely keeps more
constexpr int kRunIds = 512;     // running sums remembered every so many ids

// The number in [0, 1) that belongs to a seed and a position: Philox4x32-10 as octavo/runtime/counter_rng.py defines
// it.
double uniform(int64_t seed, int32_t position) {
  uint32_t c[4] = {uint32_t(position), 0, 0, 0};
  uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(c[0]) * 0xD2511F53u;
    const uint64_t product2 = uint64_t(c[2]) * 0xCD9E8D57u;
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = uint32_t(product2 >> 32) ^ c1 ^ k0;
    c[1] = uint32_t(product2);
    c[2] = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c[3] = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[1]) << 32 | c[0]) >> 11) * 0x1p-53;
}

}  // namespace

Sampler::Sampler(const SampleKernels& kernels, int vocab_size)
    : kernels_(&kernels),
      vocab_size_(vocab_size),
      scores_(size_t(vocab_size)),
      weights_(size_t(vocab_size)),
      block_tops_(2 * size_t((vocab_size + kBlockIds - 1) / kBlockIds)),
      num_seen_(size_t(vocab_size)) {
  ids_.reserve(size_t(vocab_size));
}

size_t Sampler::resident_bytes() const {
  return (scores_.size() + weights_.size() + block_tops_.size()) * sizeof(double) +
         (ids_.capacity() + num_seen_.size()) * sizeof(int32_t);
}

void Sampler::sample(const float* logits, const SampleRequest& request, SampleAnswer& answer) {
  answer.has_logprobs = request.num_logprobs >= 0;
  const float highest = kernels_->highest_logit(logits, vocab_size_);
  answer.token_id = std::isfinite(highest) ? choose(logits, highest, request) : kNoToken;
  if (answer.token_id == kNoToken) {
    answer.has_logprobs = false;
  } else if (answer.has_logprobs) {
    score(logits, answer.token_id, request.num_logprobs, answer.logprobs);
  }
}

int32_t Sampler::choose(const float* logits, float highest_logit, const SampleRequest& request) {
  const bool is_plain = request.bias.empty() && request.banned.empty() && !request.has_penalties();
  if (is_plain && request.temperature == 0.0) {
    return kernels_->first_index(logits, vocab_size_, highest_logit);
  }
  adjust(logits, request);
  const auto highest = std::max_element(scores_.begin(), scores_.end());  // the first of equals
  if (*highest == -std::numeric_limits<double>::infinity()) return kNoToken;
  if (request.temperature == 0.0) return int32_t(highest - scores_.begin());
  return draw(request, *highest);
}

void Sampler::adjust(const float* logits, const SampleRequest& request) {
  kernels_->widen(logits, vocab_size_, scores_.data());
  for (const auto& [id, bias] : request.bias) scores_[size_t(id)] += bias;
  for (const int32_t id : request.banned) scores_[size_t(id)] = -std::numeric_limits<double>::infinity();
  if (request.has_penalties()) penalise(request);
}

// Repetition sees prompt and output, the other two count the output alone.
void Sampler::penalise(const SampleRequest& request) {
  for (const std::span<const int32_t> part : {request.prompt, request.output}) {
    for (const int32_t id : part) {
      double& score = scores_[size_t(id)];
      if (num_seen_[size_t(id)]++ == 0) {
        score = score > 0 ? score / request.repetition_penalty : score * request.repetition_penalty;
      }
    }
  }
  for (const std::span<const int32_t> part : {request.prompt, request.output}) {
    for (const int32_t id : part) num_seen_[size_t(id)] = 0;
  }
  for (const int32_t id : request.output) ++num_seen_[size_t(id)];
  for (const int32_t id : request.output) {
    const int32_t count = std::exchange(num_seen_[size_t(id)], 0);
    if (count == 0) continue;
    scores_[size_t(id)] -= request.frequency_penalty * count;
    scores_[size_t(id)] -= request.presence_penalty;
  }
}

int32_t Sampler::draw(const SampleRequest& request, double highest) {
  const double least = std::max(request.min_p, std::numeric_limits<double>::denorm_min());
  kernels_->weigh(scores_.data(), vocab_size_, highest, request.temperature, least, weights_.data());
  if (request.top_k > 0 && request.top_k < vocab_size_) {
    order_top(scores_.data(), weights_.data(), request.top_k);
    keep(request.top_k);
  }
  if (request.top_p < 1.0) {
    const double target = request.top_p * kernels_->lane_sum(weights_.data(), vocab_size_);
    int num_kept = 0;
    for (int count = kFirstTopP;; count *= 8) {
      order_top(scores_.data(), weights_.data(), std::min(count, vocab_size_));
      double running = 0.0;
      num_kept = 0;
      bool is_reached = false;
      while (num_kept < int(ids_.size()) && !is_reached) {
        running = running + weights_[size_t(ids_[size_t(num_kept++)])];
        is_reached = running >= target;
      }
      if (is_reached || count >= vocab_size_) break;
    }
    keep(num_kept);
  }
  // The first token at which the running sum exceeds its share. Dropped tokens add 0 and are never the first.
  double checkpoints = 0.0;
  std::vector<double>& runs = block_tops_;  // running sum before each run of ids
  int last_kept = 0;
  for (int begin = 0, run = 0; begin < vocab_size_; begin += kRunIds, ++run) {
    runs[size_t(run)] = checkpoints;
    const int end = std::min(begin + kRunIds, vocab_size_);
    for (int id = begin; id < end; ++id) checkpoints += weights_[size_t(id)];
    if (checkpoints > runs[size_t(run)]) last_kept = run;
  }
  const double threshold = uniform(request.seed, request.position) * checkpoints;
  int run = 0;
  while (run < last_kept && !(runs[size_t(run) + 1] > threshold)) ++run;
  double running = runs[size_t(run)];
  int32_t chosen = 0;
  for (int id = run * kRunIds; id < std::min((run + 1) * kRunIds, vocab_size_); ++id) {
    if (weights_[size_t(id)] == 0.0) continue;
    running += weights_[size_t(id)];
    chosen = id;
    if (running > threshold) break;
  }
  return chosen;
}

// Fills `ids_` with the first `count` kept ids (weight above 0, or any when `weights` is null) in canonical order.
void Sampler::order_top(const double* scores, const double* weights, int count) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const auto is_kept = [&](int id) { return weights == nullptr || weights[id] > 0.0; };
  const size_t num_blocks = block_tops_.size() / 2;
  double least = kNone;
  if (size_t(count) < num_blocks) {
    // `count` blocks have a score of at least the count-th highest block top, so no lower score is among the first.
    for (size_t block = 0; block < num_blocks; ++block) {
      const int begin = int(block) * kBlockIds, end = std::min(begin + kBlockIds, vocab_size_);
      double top = kNone;
      for (int id = begin; id < end; ++id) top = is_kept(id) && scores[id] > top ? scores[id] : top;
      block_tops_[block] = top;
    }
    const auto nth = block_tops_.begin() + (count - 1);
    std::nth_element(block_tops_.begin(), nth, block_tops_.begin() + std::ptrdiff_t(num_blocks), std::greater<>());
    least = *nth;
  }
  ids_.clear();
  for (int id = 0; id < vocab_size_; ++id) {
    if (scores[id] >= least && is_kept(id)) ids_.push_back(id);
  }
  const auto is_before = [scores](int32_t a, int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  };
  if (int(ids_.size()) > count) {
    std::nth_element(ids_.begin(), ids_.begin() + count, ids_.end(), is_before);
    ids_.resize(size_t(count));
  }
  std::sort(ids_.begin(), ids_.end(), is_before);
}

// Drops all tokens but the first `count` of `ids_`.
void Sampler::keep(int count) {
  count = std::min(count, int(ids_.size()));
  std::sort(ids_.begin(), ids_.begin() + count);
  int next = 0;
  for (int id = 0; id < vocab_size_; ++id) {
    if (next < count && ids_[size_t(next)] == id) {
      ++next;
    } else {
      weights_[size_t(id)] = 0.0;
    }
  }
}

void Sampler::score(const float* logits, int32_t token_id, int num_top, TokenLogprobs& answer) {
  answer = {};
  const float top_logit = kernels_->highest_logit(logits, vocab_size_);
  if (!std::isfinite(top_logit)) {
    answer.token_id = kNoToken;
    return;
  }
  const double highest = top_logit;
  const double log_sum = std::log(kernels_->sum_of_exp(logits, vocab_size_, highest));
  const double own = double(logits[token_id]) - highest;
  kernels_->widen(logits, vocab_size_, scores_.data());
  int32_t rank = 1;
  for (int id = 0; id < vocab_size_; ++id) {
    // Compared as differences, as the definition has it: two logits far below the highest may have the same.
    scores_[size_t(id)] -= highest;
    rank += scores_[size_t(id)] > own || (scores_[size_t(id)] == own && id < token_id);
  }
  answer.token_id = token_id;
  answer.logprob = own - log_sum;
  answer.rank = rank;
  if (num_top == 0) return;
  order_top(scores_.data(), nullptr, std::min(num_top, vocab_size_));
  answer.top.reserve(ids_.size());
  for (const int32_t id : ids_) answer.top.emplace_back(id, scores_[size_t(id)] - log_sum);
}

}  // namespace octavo
