// Drives whole steps without Python, so that sanitizers see nothing but our code (scripts/sanitize.sh builds it with
// each of them). What the numbers should be is tested in tests/runtime; here every way of computing a request must give
// the same bits, while the sanitizer watches memory, arithmetic and threads.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "executor.h"
#include "half.h"
#include "isa.h"
#include "team.h"

namespace octavo {
namespace {

int num_checks = 0;

void check(bool is_right, const std::string& what) {
  ++num_checks;
  if (is_right) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

// --- a random model
// ---------------------------------------------------------------------------------------------------

constexpr int kVocab = 75;
constexpr int kHidden = 64;
constexpr int kInner = 96;
constexpr int kWindow = 21;
constexpr int kNumSinks = 5;

struct Shape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
};

class ModelMaker {
 public:
  ModelMaker(uint64_t seed, Shape shape, WeightKind kind, Isa isa)
      : rng_(seed), shape_(shape), kind_(kind), isa_(isa) {}

  // Two layers, the second with a window and sinks, in two KV groups.
  Program make(int max_tokens, int max_selected) {
    const int q_width = shape_.num_heads * shape_.head_dim;
    const int kv_width = shape_.num_kv_heads * shape_.head_dim;
    const int residual = buffer(kHidden, false, max_tokens), branch = buffer(kHidden, false, max_tokens);
    const int qkv = buffer(q_width + 2 * kv_width, false, max_tokens), attended = buffer(q_width, false, max_tokens);
    const int sink_q = buffer(q_width, false, max_tokens);
    const int gate_up = buffer(2 * kInner, false, max_tokens), inner = buffer(kInner, false, max_tokens);
    const int selected = buffer(kHidden, true, max_selected);
    program_.logits = buffer(kVocab, true, max_selected);
    const int embed = linear({kVocab}, kHidden);
    op({.kind = OpKind::embed, .out = residual, .weight = embed, .value = 1.0f});
    for (int layer = 0; layer < 2; ++layer) {
      op({.kind = OpKind::rms_norm, .x = residual, .out = branch, .weight = norm(kHidden), .value = 1e-5f});
      op({.kind = OpKind::linear, .x = branch, .out = qkv, .weight = linear({q_width, kv_width, kv_width}, kHidden)});
      op({.kind = OpKind::head_rms_norm,
          .x = qkv,
          .weight = norm(shape_.head_dim),
          .value = 1e-5f,
          .offset = q_width,
          .num_heads = shape_.num_kv_heads,
          .head_dim = shape_.head_dim});
      op({.kind = OpKind::rope_store,
          .x = qkv,
          .layer = layer,
          .sink_q = layer == 0 ? -1 : sink_q,
          .sink_position = kWindow + kNumSinks - 1});
      const float scale = 1.0f / std::sqrt(float(shape_.head_dim));
      op({.kind = OpKind::attend,
          .x = qkv,
          .out = attended,
          .layer = layer,
          .value = scale,
          .window = layer == 0 ? 0 : kWindow,
          .num_sinks = layer == 0 ? 0 : kNumSinks,
          .sink_q = layer == 0 ? -1 : sink_q});
      op({.kind = OpKind::linear, .x = attended, .out = branch, .weight = linear({kHidden}, q_width)});
      op({.kind = OpKind::add, .x = residual, .out = branch});
      op({.kind = OpKind::rms_norm, .x = residual, .out = branch, .weight = norm(kHidden), .value = 1e-5f});
      op({.kind = OpKind::linear, .x = branch, .out = gate_up, .weight = linear({kInner, kInner}, kHidden)});
      op({.kind = OpKind::activate, .x = gate_up, .out = inner});
      op({.kind = OpKind::linear, .x = inner, .out = branch, .weight = linear({kHidden}, kInner)});
      op({.kind = OpKind::add, .x = residual, .out = branch});
    }
    op({.kind = OpKind::select_rows, .x = residual, .out = selected});
    op({.kind = OpKind::rms_norm, .x = selected, .out = selected, .weight = norm(kHidden), .value = 1e-5f});
    op({.kind = OpKind::linear, .x = selected, .out = program_.logits, .weight = embed});
    return program_;
  }

  ModelSizes sizes() const {
    ModelSizes sizes{};
    sizes.vocab_size = kVocab;
    sizes.num_heads = shape_.num_heads;
    sizes.num_kv_heads = shape_.num_kv_heads;
    sizes.head_dim = shape_.head_dim;
    sizes.rotary_dim = shape_.head_dim;
    for (int i = 0; i < shape_.head_dim / 2; ++i)
      sizes.inverse_frequencies.push_back(std::pow(1e4, -2.0 * i / shape_.head_dim));
    sizes.attention_scaling = 1.0;
    sizes.layer_groups = {0, 1};
    sizes.layer_indices = {0, 0};
    sizes.num_groups = 2;
    return sizes;
  }

 private:
  void op(Op each) { program_.ops.push_back(each); }

  int buffer(int width, bool is_selected, int rows) {
    const int64_t stride = (width + 15) / 16 * 16;
    program_.buffers.push_back({width, stride, program_.arena_bytes, is_selected});
    program_.arena_bytes += rows * stride * 4;
    return int(program_.buffers.size()) - 1;
  }

  int norm(int width) {
    std::vector<float> weight;
    for (int i = 0; i < width; ++i) weight.push_back(1.0f + 0.1f * normal_(rng_));
    program_.vectors.push_back(weight);
    return int(program_.vectors.size()) - 1;
  }

  int linear(const std::vector<int>& outputs, int num_inputs) {
    std::vector<std::vector<uint8_t>> rows;
    std::vector<LinearPart> parts;
    for (const int num_outputs : outputs) rows.push_back(random_rows(num_outputs, num_inputs));
    for (size_t i = 0; i < outputs.size(); ++i) parts.push_back({kind_, rows[i].data(), outputs[i], nullptr});
    program_.linears.push_back(pack_linear(parts, num_inputs, isa_));
    return int(program_.linears.size()) - 1;
  }

  // Weights of about 0.12 in the form of a file: float32, or groups of 32 with f16 scales and random codes.
  std::vector<uint8_t> random_rows(int num_outputs, int num_inputs) {
    std::vector<uint8_t> bytes;
    const auto put = [&bytes](const auto& value) {
      const auto* from = reinterpret_cast<const uint8_t*>(&value);
      bytes.insert(bytes.end(), from, from + sizeof value);
    };
    const int64_t count = int64_t(num_outputs) * num_inputs;
    if (kind_ == WeightKind::f32) {
      for (int64_t i = 0; i < count; ++i) put(0.12f * normal_(rng_));
      return bytes;
    }
    for (int64_t group = 0; group < count / 32; ++group) {
      put(f16_of(kind_ == WeightKind::int8 ? 0.0016f : 0.026f));
      if (kind_ == WeightKind::q4_1) put(f16_of(-0.2f));
      for (int i = 0; i < (kind_ == WeightKind::int8 ? 32 : 16); ++i) put(uint8_t(rng_()));
    }
    return bytes;
  }

  std::mt19937_64 rng_;
  std::normal_distribution<float> normal_;
  Shape shape_;
  WeightKind kind_;
  Isa isa_;
  Program program_{};
};

// --- one request, computed in many ways
// -------------------------------------------------------------------------------

struct Way {
  int chunk;
  int block_size;
  int num_threads;
  int company;  // other requests in each step
};

struct Answers {
  std::vector<int32_t> tokens;
  std::vector<float> logits;

  bool operator==(const Answers& other) const {
    return tokens == other.tokens && logits.size() == other.logits.size() &&
           std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0;
  }
};

struct Request {
  std::vector<int32_t> tokens;
  std::vector<int32_t> tables[2];
};

SampleRequest sample_of(int logits_row, int position, int variety) {
  SampleRequest sample{};
  sample.logits_row = logits_row;
  sample.position = position;
  sample.seed = 11 * variety;
  sample.temperature = variety % 3 == 0 ? 0.0 : 0.8;
  sample.top_p = variety % 3 == 1 ? 0.9 : 1.0;
  sample.top_k = variety % 3 == 2 ? 5 : 0;
  sample.repetition_penalty = 1.0;
  sample.num_logprobs = variety % 4;
  return sample;
}

Answers compute(const Program& program, const ModelSizes& sizes, KvType kv_type, bool is_bounded, Isa isa, Way way,
                uint64_t seed) {
  constexpr int kNumNew = 4;
  constexpr int kCompanyTokens = 60;  // other requests grow to this
  std::mt19937 rng(static_cast<uint32_t>(seed));
  std::vector<int32_t> free_blocks(400);
  for (size_t i = 0; i < free_blocks.size(); ++i) free_blocks[i] = int32_t(i) + 1;
  std::vector<Request> requests(size_t(way.company) + 1);
  for (size_t r = 0; r < requests.size(); ++r) {
    const int length = r == 0 ? 600 : 3 + int(rng() % 40);
    for (int i = 0; i < length; ++i) requests[r].tokens.push_back(int32_t(rng() % kVocab));
  }
  std::shuffle(free_blocks.begin(), free_blocks.end(), rng);
  Executor executor(program, sizes,
                    {.num_blocks = 400,
                     .block_size = way.block_size,
                     .kv_types = {kv_type, kv_type},
                     .bounded_layers = {is_bounded, false},
                     .max_num_tokens = 700,
                     .max_num_requests = 8,
                     .max_num_selected = 4,
                     .num_threads = way.num_threads,
                     .isa = isa,
                     .may_widen = true,
                     .prefault = false,
                     .poison = true});
  for (Request& request : requests) {
    const int length = std::max(int(request.tokens.size()) + kNumNew, kCompanyTokens);
    const int needed = (length + way.block_size - 1) / way.block_size;
    for (auto& table : request.tables) {
      table.assign(free_blocks.end() - needed, free_blocks.end());
      free_blocks.resize(free_blocks.size() - size_t(needed));
    }
  }
  // The last one in company continues the first request's beginning: it holds the same blocks and only reads them.
  const bool has_twin = way.company > 1;
  const int num_common = (kSplitTokens + way.block_size - 1) / way.block_size * way.block_size;  // a split, in blocks
  if (has_twin) {
    Request& twin = requests.back();
    twin.tokens.assign(requests[0].tokens.begin(), requests[0].tokens.begin() + num_common);
    for (int i = 0; i < 30; ++i) twin.tokens.push_back(int32_t(rng() % kVocab));
    for (int g = 0; g < 2; ++g) {
      std::vector<int32_t>& table = twin.tables[g];
      table.insert(table.begin(), requests[0].tables[g].begin(),
                   requests[0].tables[g].begin() + num_common / way.block_size);
    }
  }
  Answers answers;
  size_t num_shared_items = 0;
  std::vector<int> computed(requests.size(), 0);
  StepOutput output;
  for (int step = 0; int(answers.tokens.size()) < kNumNew; ++step) {
    std::vector<int32_t> offsets{0}, starts, tokens, selected, new_blocks, block_ids[2], table_offsets[2] = {{0}, {0}};
    StepInput input;
    std::vector<int32_t> scored;
    std::vector<bool> is_answered(requests.size(), false);
    if (step == 1) {  // the first request goes on with a copy of one of its blocks
      int32_t& copied = requests[0].tables[0][size_t(kSplitTokens / way.block_size) + 1];
      input.copies = {{copied, free_blocks[0]}};
      copied = free_blocks[0];
    }
    for (size_t r = 0; r < requests.size(); ++r) {
      Request& request = requests[r];
      const bool is_twin = has_twin && r + 1 == requests.size();
      if (is_twin && computed[0] < num_common) continue;
      if (is_twin) computed[r] = std::max(computed[r], num_common);
      const int left = int(request.tokens.size()) - computed[r];
      const int count = std::min(left, r == 0 ? way.chunk : is_twin ? 1 : 1 + int(rng() % 9));
      for (const auto& table : request.tables) {
        for (int p = computed[r]; p < computed[r] + count; ++p) {
          if (p % way.block_size == 0) new_blocks.push_back(table[size_t(p / way.block_size)]);
        }
      }
      tokens.insert(tokens.end(), request.tokens.begin() + computed[r], request.tokens.begin() + computed[r] + count);
      starts.push_back(computed[r]);
      offsets.push_back(int32_t(tokens.size()));
      for (int g = 0; g < 2; ++g) {
        block_ids[g].insert(block_ids[g].end(), request.tables[g].begin(), request.tables[g].end());
        table_offsets[g].push_back(int32_t(block_ids[g].size()));
      }
      computed[r] += count;
      if (computed[r] == int(request.tokens.size())) {
        is_answered[r] = true;
        selected.push_back(int32_t(tokens.size()) - 1);
        input.samples.push_back(
            sample_of(int(selected.size()) - 1, computed[r], int(r) * 5 + int(answers.tokens.size())));
      }
    }
    if (way.company > 0 && !selected.empty()) {  // score what was selected anyway
      scored.assign(selected.size(), 3);
      input.scores.push_back({0, 2, scored});
    }
    input.query_offsets = offsets;
    input.start_positions = starts;
    input.token_ids = tokens;
    input.tables = {{block_ids[0], table_offsets[0]}, {block_ids[1], table_offsets[1]}};
    input.new_blocks = new_blocks;
    input.selected_rows = selected;
    executor.step(input, output);
    num_shared_items += executor.num_shared_items();
    size_t next = 0;
    for (size_t r = 0; r < requests.size(); ++r) {
      if (!is_answered[r]) continue;
      const SampleAnswer& answer = output.samples[next++];
      check(answer.token_id >= 0 && answer.token_id < kVocab, "an answer is a token");
      if (r == 0) {
        answers.tokens.push_back(answer.token_id);
        if (next - 1 < 4 && selected.size() <= 4) {
          const float* logits = executor.buffer(program.logits);
          answers.logits.insert(answers.logits.end(), logits, logits + kVocab);
        }
      }
      if (r == 0 || requests[r].tokens.size() < kCompanyTokens) requests[r].tokens.push_back(answer.token_id);
    }
    for (size_t r = 1; r < requests.size(); ++r) {
      // A request that is at its end starts again, so that company never runs out.
      if (computed[r] == int(requests[r].tokens.size())) computed[r] = 0;
    }
  }
  // Rows that read sparsely have tiles of their own, and those of the other layer see a window.
  check(!has_twin || is_bounded || num_shared_items > 0, "requests visited blocks together");
  return answers;
}

// With `sparse_tiles` the first layer reads so many tiles a query.
void check_ways(WeightKind kind, KvType kv_type, Shape shape, Isa isa, uint64_t seed, int sparse_tiles = 0) {
  ModelMaker maker(seed, shape, kind, isa);
  Program program = maker.make(700, 4);
  for (Op& op : program.ops) {
    if (op.kind == OpKind::attend && op.layer == 0) op.sparse_tiles = sparse_tiles;
  }
  const ModelSizes sizes = maker.sizes();
  const auto answers = [&](Way way) { return compute(program, sizes, kv_type, sparse_tiles > 0, isa, way, seed); };
  const Answers plain = answers({700, 16, 1, 0});
  check(plain.logits.size() == 4 * kVocab, "logits were seen");
  for (const Way way : {Way{64, 16, 2, 0}, Way{37, 32, 3, 2}, Way{500, 48, 4, 3}}) {
    check(answers(way) == plain, std::string(isa_name(isa)) + ": chunk " + std::to_string(way.chunk) + ", block " +
                                     std::to_string(way.block_size) + ", threads " + std::to_string(way.num_threads) +
                                     ", company " + std::to_string(way.company) + ", sparse " +
                                     std::to_string(sparse_tiles) + " changes bits");
  }
}

// --- masks of allowed ids
// ---------------------------------------------------------------------------------------------------------

// A masked draw is the draw from a row whose other logits were -inf all along, and unmasked scores stay as they were.
void check_masks(Isa isa, uint64_t seed) {
  std::mt19937_64 rng(seed);
  for (const int vocab_size : {1, 31, 32, 33, 700}) {
    Sampler sampler(kernels_of(isa).sample, vocab_size);
    for (int variety = 0; variety < 60; ++variety) {
      std::vector<float> logits(static_cast<size_t>(vocab_size));
      for (float& logit : logits) logit = float(rng() % 1000) / 100.0f;
      std::vector<uint32_t> allowed(size_t(vocab_size + 31) / 32);
      for (uint32_t& word : allowed) word = variety % 5 == 0 ? ~uint32_t(0) : uint32_t(rng() & rng());
      const int32_t kept = int32_t(rng() % uint64_t(vocab_size));
      allowed[size_t(kept / 32)] |= uint32_t(1) << (kept % 32);
      std::vector<float> hidden = logits;
      for (int id = 0; id < vocab_size; ++id) {
        if ((allowed[size_t(id / 32)] >> (id % 32) & 1) == 0) hidden[size_t(id)] = -INFINITY;
      }
      SampleRequest masked = sample_of(0, variety, variety);
      SampleRequest plain = masked;
      masked.allowed = allowed;
      SampleAnswer got, want;
      sampler.sample(logits.data(), masked, got);
      sampler.sample(hidden.data(), plain, want);
      check(got.token_id == want.token_id, "a mask removes ids before anything else");
      TokenLogprobs score;
      sampler.score(logits.data(), got.token_id, masked.num_logprobs, score);
      check(got.logprobs.logprob == score.logprob && got.logprobs.top == score.top, "a mask leaves scores alone");
    }
    const std::vector<uint32_t> none(size_t(vocab_size + 31) / 32);
    SampleRequest masked = sample_of(0, 0, 0);
    masked.allowed = none;
    SampleAnswer got;
    sampler.sample(std::vector<float>(static_cast<size_t>(vocab_size)).data(), masked, got);
    check(got.token_id == kNoToken, "a mask that allows nothing chooses nothing");
  }
}

// --- the team
// ---------------------------------------------------------------------------------------------------------

void check_team(int num_threads) {
  Team team(num_threads);
  std::vector<int64_t> counts(size_t(num_threads) * 16);
  for (int round = 0; round < 50; ++round) {
    team.run([&](int thread) {
      for (int i = 0; i < 20; ++i) {
        ++counts[size_t(thread) * 16];  // plain memory: ordered by the barriers alone
        team.barrier();
        int64_t sum = 0;
        for (int other = 0; other < num_threads; ++other) sum += counts[size_t(other) * 16];
        if (sum != int64_t(num_threads) * (round * 20 + i + 1)) std::abort();
        team.barrier();
      }
    });
  }
  check(counts[0] == 1000, "every body ran every time");

  // Each phase reads what the one before wrote, in memory that only phases order.
  std::vector<uint64_t> cells(2 * 9);
  uint64_t expected = 0;
  for (int run = 0; run < 40; ++run) {
    const auto body = [&](int thread) {
      for (int phase = 0; phase < 60; ++phase) {
        const int64_t num_chunks = 1 + (phase * 7 + run) % 9;
        const uint64_t* before = &cells[size_t((phase + 1) % 2) * 9];
        uint64_t* after = &cells[size_t(phase % 2) * 9];
        team.for_chunks(thread, num_chunks, [&](int64_t chunk) {
          uint64_t sum = uint64_t(chunk);
          for (int i = 0; i < 9; ++i) sum = (sum * 31 + before[i]) % 1000003;
          after[chunk] = sum;
        });
      }
    };
    run % 2 == 0 ? team.run(body) : team.run_chunks(body);
  }
  for (const uint64_t cell : cells) expected = expected * 7 + cell;
  static uint64_t alone = 0;  // the first team has one thread
  if (num_threads == 1) alone = expected;
  check(expected == alone, "phases run in order, each chunk once, however many threads there are");
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  using namespace octavo;
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (const int num_threads : {1, 2, 5}) check_team(num_threads);
  std::vector<Isa> isas{Isa::portable};
  if (has_avx2()) isas.push_back(Isa::avx2);
  for (const Isa isa : isas) {
    check_masks(isa, seed);
    check_ways(WeightKind::f32, KvType::f32, {6, 2, 32}, isa, seed);
    check_ways(WeightKind::q4_1, KvType::f16, {8, 1, 20}, isa, seed + 1);
    check_ways(WeightKind::int8, KvType::bf16, {3, 3, 32}, isa, seed + 2);
    check_ways(WeightKind::f32, KvType::int8, {6, 2, 32}, isa, seed + 3);
    check_ways(WeightKind::q4_1, KvType::fp8_e4m3, {8, 1, 20}, isa, seed + 4);
    check_ways(WeightKind::f32, KvType::int4, {3, 3, 32}, isa, seed + 5);
    check_ways(WeightKind::int8, KvType::int4, {8, 1, 12}, isa, seed + 6);
    check_ways(WeightKind::f32, KvType::f16, {6, 2, 32}, isa, seed + 7, 6);
    check_ways(WeightKind::q4_1, KvType::int4, {8, 1, 20}, isa, seed + 8, 9);
    check_ways(WeightKind::f32, KvType::int8, {3, 3, 12}, isa, seed + 9, 3);
  }
  std::printf("%d checks passed\n", num_checks);
  return 0;
}
