#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace octavo {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

size_t divide_up(int a, int b) { return size_t((a + b - 1) / b); }

}  // namespace

Sampler::Sampler(const SampleKernels& kernels, int vocab_size)
    : kernels_(&kernels),
      vocab_size_(vocab_size),
      scores_(size_t(vocab_size)),
      weights_(size_t(vocab_size)),
      runs_(divide_up(vocab_size, kRunIds)),
      block_tops_(divide_up(vocab_size, kBlockIds)),
      gathered_(size_t(vocab_size)),
      num_seen_(size_t(vocab_size)) {
  kept_.reserve(size_t(vocab_size));
}

size_t Sampler::resident_bytes() const {
  return (scores_.size() + weights_.size() + runs_.size() + block_tops_.size() + gathered_.size()) * sizeof(double) +
         (kept_.capacity() + num_seen_.size()) * sizeof(int32_t);
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
  const bool is_greedy = request.temperature == 0.0;
  const double least = std::max(request.min_p, std::numeric_limits<double>::denorm_min());
  if (!request.is_adjusted()) {
    if (is_greedy) return kernels_->first_index(logits, vocab_size_, highest_logit);
    return draw({logits, 0.0}, request, {highest_logit, request.temperature, least});
  }
  adjust(logits, request);
  find_block_tops({nullptr, 0.0});
  const auto block = std::max_element(block_tops_.begin(), block_tops_.end());  // the first of equals
  if (*block == -kInfinity) return kNoToken;
  if (!is_greedy) return draw({nullptr, 0.0}, request, {*block, request.temperature, least});
  const auto first = scores_.begin() + (block - block_tops_.begin()) * kBlockIds;
  return int32_t(std::find(first, scores_.end(), *block) - scores_.begin());
}

void Sampler::adjust(const float* logits, const SampleRequest& request) {
  kernels_->widen(logits, vocab_size_, scores_.data());
  if (!request.allowed.empty()) keep_allowed(request.allowed);
  for (const auto& [id, bias] : request.bias) scores_[size_t(id)] += bias;
  for (const int32_t id : request.banned) scores_[size_t(id)] = -kInfinity;
  if (request.has_penalties()) penalise(request);
}

// Set, not added to or multiplied: what a masked id scored must not matter, whatever it was.
void Sampler::keep_allowed(std::span<const uint32_t> allowed) {
  for (int first = 0; first < vocab_size_; first += 32) {
    const uint32_t word = allowed[size_t(first / 32)];
    if (word == ~uint32_t(0)) continue;
    for (int id = first; id < std::min(first + 32, vocab_size_); ++id) {
      if ((word >> (id - first) & 1) == 0) scores_[size_t(id)] = -kInfinity;
    }
  }
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

int32_t Sampler::draw(const Scores& scores, const SampleRequest& request, const Temper& temper) {
  const double u = uniform(request.seed, request.position);
  if (request.top_k > 0 && request.top_k < vocab_size_) {
    keep_top_k(scores, request.top_k, temper);
    if (request.top_p < 1.0) keep_top_p(scores, request.top_p * lane_sum_of_kept());
    return draw_from_kept(u);
  }
  if (request.top_p < 1.0 && keep_top_p_of_row(scores, request.top_p, temper)) return draw_from_kept(u);
  return draw_from_row(weigh_row(scores, temper), u);
}

// Leaves the first `top_k` ids with a weight in `kept_`, ascending, or all of them where there are fewer.
void Sampler::keep_top_k(const Scores& scores, int top_k, const Temper& temper) {
  gather_top(scores, top_k);
  weigh_kept(scores, temper);
  drop_weightless();
  if (int(kept_.size()) < top_k) {
    // Rounding might give an id further down a weight that one of these lacks: look at all.
    gather(scores, -kInfinity);
    weigh_kept(scores, temper);
    drop_weightless();
  }
  order(scores, top_k);
  std::sort(kept_.begin(), kept_.end());
}

// Leaves the shortest start of the canonical order whose weights reach `target`, or all that is kept, ascending.
void Sampler::keep_top_p(const Scores& scores, double target) {
  order(scores, int(kept_.size()));
  double running = 0.0;
  size_t count = 0;
  while (count < kept_.size()) {
    running += weights_[size_t(kept_[count++])];
    if (running >= target) break;
  }
  kept_.resize(count);
  std::sort(kept_.begin(), kept_.end());
}

// The same for a whole row. Returns false when all ids with a weight stay.
bool Sampler::keep_top_p_of_row(const Scores& scores, double top_p, const Temper& temper) {
  weigh_row(scores, temper);
  const double target = top_p * kernels_->lane_sum(weights_.data(), vocab_size_);
  double masses[kNumMasses];
  kernels_->masses_above(weights_.data(), vocab_size_, masses);
  // Sorting is the dear part: begin with as few of the highest scores as seem to hold the target.
  for (int m = 0; m < kNumMasses; ++m) {
    if (masses[m] < target) continue;
    gather(scores, temper.highest + temper.temperature * std::log(kMassBounds[m]));
    drop_weightless();
    const size_t num_gathered = kept_.size();
    double sum = 0.0;
    for (const int32_t id : kept_) sum += weights_[size_t(id)];
    if (sum < target * (1 + 1e-9)) continue;  // reached in canonical order, too, whatever rounding does
    keep_top_p(scores, target);
    if (kept_.size() < num_gathered) return true;
  }
  gather(scores, -kInfinity);
  drop_weightless();
  keep_top_p(scores, target);
  return true;
}

// The first id, ascending, at which the running sum of weights exceeds its share. Dropped ids add 0 and are never it.
int32_t Sampler::draw_from_row(double total, double u) const {
  const double threshold = u * total;
  size_t run = 0;
  while (run + 1 < runs_.size() && !(runs_[run + 1] > threshold)) ++run;
  // Rounding may leave no id: then it is the last one with a weight.
  while (run > 0 && runs_[run] == total) --run;
  double running = runs_[run];
  int32_t chosen = 0;
  const int begin = int(run) * kRunIds;
  for (int id = begin; id < std::min(begin + kRunIds, vocab_size_); ++id) {
    if (weights_[size_t(id)] == 0.0) continue;
    running += weights_[size_t(id)];
    chosen = id;
    if (running > threshold) break;
  }
  return chosen;
}

int32_t Sampler::draw_from_kept(double u) const {
  double total = 0.0;
  for (const int32_t id : kept_) total += weights_[size_t(id)];
  const double threshold = u * total;
  double running = 0.0;
  for (const int32_t id : kept_) {
    running += weights_[size_t(id)];
    if (running > threshold) return id;
  }
  return kept_.back();
}

void Sampler::find_block_tops(const Scores& scores) {
  if (scores.logits == nullptr) {
    kernels_->block_tops_doubles(scores_.data(), vocab_size_, block_tops_.data());
  } else {
    kernels_->block_tops_floats(scores.logits, vocab_size_, scores.subtracted, block_tops_.data());
  }
}

// Fills `kept_` with the ids whose score is at least `least`, ascending.
void Sampler::gather(const Scores& scores, double least) {
  kept_.resize(size_t(vocab_size_));
  const int count = scores.logits == nullptr
                        ? kernels_->gather_doubles(scores_.data(), vocab_size_, least, kept_.data())
                        : kernels_->gather_floats(scores.logits, vocab_size_, scores.subtracted, least, kept_.data());
  kept_.resize(size_t(count));
}

// Fills `kept_` with at least `count` ids, the first in canonical order among them: as many blocks have a score of at
// least the count-th highest block top, so no lower score is among the first.
void Sampler::gather_top(const Scores& scores, int count) {
  if (size_t(count) >= block_tops_.size()) return gather(scores, -kInfinity);
  find_block_tops(scores);
  const auto nth = block_tops_.begin() + (count - 1);
  std::nth_element(block_tops_.begin(), nth, block_tops_.end(), std::greater<>());
  gather(scores, *nth);
}

// Leaves the first `count` of `kept_` in canonical order: score descending, ties by id.
void Sampler::order(const Scores& scores, int count) {
  const auto is_before = [&](int32_t a, int32_t b) {
    const double x = score_at(scores, a), y = score_at(scores, b);
    return x > y || (x == y && a < b);
  };
  if (int(kept_.size()) > count) {
    std::nth_element(kept_.begin(), kept_.begin() + count, kept_.end(), is_before);
    kept_.resize(size_t(count));
  }
  std::sort(kept_.begin(), kept_.end(), is_before);
}

double Sampler::weigh_row(const Scores& scores, const Temper& temper) {
  if (scores.logits == nullptr) {
    return kernels_->weigh_doubles(scores_.data(), vocab_size_, temper, weights_.data(), runs_.data());
  }
  return kernels_->weigh_floats(scores.logits, vocab_size_, temper, weights_.data(), runs_.data());
}

// Sets the weights of `kept_`, each as in the whole row.
void Sampler::weigh_kept(const Scores& scores, const Temper& temper) {
  const size_t count = kept_.size();
  for (size_t i = 0; i < count; ++i) gathered_[i] = score_at(scores, kept_[i]);
  kernels_->weigh_doubles(gathered_.data(), int(count), temper, gathered_.data(), runs_.data());
  for (size_t i = 0; i < count; ++i) weights_[size_t(kept_[i])] = gathered_[i];
}

void Sampler::drop_weightless() {
  std::erase_if(kept_, [&](int32_t id) { return weights_[size_t(id)] == 0.0; });
}

// The sum by id over a row in which all other weights are 0.
double Sampler::lane_sum_of_kept() const {
  constexpr int kLanes = 16;
  double lanes[kLanes] = {};
  for (const int32_t id : kept_) lanes[id % kLanes] += weights_[size_t(id)];
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return total;
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
  // Compared as differences, as the definition has it: two logits far below the highest may have the same.
  const double own = double(logits[token_id]) - highest;
  answer.token_id = token_id;
  answer.logprob = own - log_sum;
  answer.rank = 1 + kernels_->count_before(logits, vocab_size_, highest, own, token_id);
  if (num_top == 0) return;
  const Scores below{logits, highest};
  gather_top(below, std::min(num_top, vocab_size_));
  order(below, std::min(num_top, vocab_size_));
  answer.top.reserve(kept_.size());
  for (const int32_t id : kept_) answer.top.emplace_back(id, score_at(below, id) - log_sum);
}

}  // namespace octavo
