#include "attention.h"

#include <algorithm>
#include <bit>
#include <tuple>

namespace octavo {
namespace {

// Items per thread that balance well without making row blocks small.
constexpr int kItemsPerThread = 4;
constexpr int kMinRowsPerBlock = 12;
constexpr int kRowMultiple = 6;
// Visiting a tile costs about as much as computing this many rows with it.
constexpr int64_t kTileOverheadRows = 4;
// 4 MiB of partial sums: 30 heads of 128 dimensions over 128,000 tokens.
constexpr int64_t kPartialFloats = int64_t(1) << 20;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

}  // namespace

size_t attention_scratch_floats(int head_dim) {
  const auto area = [](int64_t count) { return size_t(round_up(count, 16)); };
  const int dims = padded_head_dim(head_dim);
  return area(int64_t(kMaxRowsPerBlock) * head_dim) + area(int64_t(kTileTokens) * head_dim) +
         area(int64_t(kTileTokens) * head_dim + 8) +
         2 * (area(int64_t(kMaxRowsPerBlock) * dims) + area(kMaxRowsPerBlock * 8) + area(kMaxRowsPerBlock));
}

AttentionSchedule::AttentionSchedule(AttentionShape shape, int max_tokens, int max_requests, int num_threads)
    : shape_(shape), num_threads_(num_threads), num_partial_floats_(num_threads > 1 ? kPartialFloats : 0) {
  const int64_t max_rows = int64_t(max_tokens) * shape.heads_per_group();
  const int64_t max_blocks = (divide_up(max_rows, kMinRowsPerBlock) + max_requests) * shape.num_kv_heads;
  // A row block is split only if it costs more than the target, into at most cost / target + 1 items.
  const int64_t max_merges = int64_t(num_threads) * kItemsPerThread + 1;
  items_.reserve(size_t(max_blocks + 2 * max_merges));
  merges_.reserve(size_t(max_merges));
  num_left_ = std::make_unique<std::atomic<int32_t>[]>(size_t(max_merges));
  if (num_partial_floats_ > 0) partials_ = std::make_unique_for_overwrite<float[]>(size_t(num_partial_floats_));
}

size_t AttentionSchedule::resident_bytes() const {
  return items_.capacity() * sizeof(AttentionItem) + merges_.capacity() * sizeof(AttentionMerge) +
         size_t(num_partial_floats_) * sizeof(float);
}

void AttentionSchedule::build(const AttentionBatch& batch) {
  items_.clear();
  merges_.clear();
  used_partial_floats_ = 0;
  const int num_tokens = batch.query_offsets[batch.num_requests];
  const int64_t num_rows = int64_t(num_tokens) * shape_.heads_per_group();
  const int64_t wanted_blocks = divide_up(int64_t(num_threads_) * kItemsPerThread, shape_.num_kv_heads);
  const int rows_per_block = int(std::clamp<int64_t>(round_up(divide_up(num_rows, wanted_blocks), kRowMultiple),
                                                     kMinRowsPerBlock, kMaxRowsPerBlock));
  for (int request = 0; request < batch.num_requests; ++request) add_rows(batch, request, rows_per_block);

  int64_t total_cost = 0;
  for (const AttentionItem& item : items_) total_cost += item.cost;
  const int64_t target_cost = divide_up(total_cost, int64_t(num_threads_) * kItemsPerThread);
  if (num_threads_ > 1) {
    const size_t num_whole = items_.size();
    for (size_t i = 0; i < num_whole; ++i) {
      const AttentionItem whole = items_[i];
      if (whole.cost > target_cost && add_split_rows(whole, target_cost)) items_[i].cost = 0;
    }
    std::erase_if(items_, [](const AttentionItem& item) { return item.cost == 0; });
  }
  // Dear ones first, so that threads finish together. Among about equal ones a KV head at a time: requests with a
  // common beginning hold the same blocks, which then come from the cache instead of from memory.
  const auto magnitude = [](const AttentionItem& item) { return std::bit_width(uint64_t(item.cost)); };
  std::sort(items_.begin(), items_.end(), [&](const AttentionItem& a, const AttentionItem& b) {
    return std::tuple(-magnitude(a), a.kv_head, a.split_begin, a.request, a.row_begin) <
           std::tuple(-magnitude(b), b.kv_head, b.split_begin, b.request, b.row_begin);
  });
}

void AttentionSchedule::add_rows(const AttentionBatch& batch, int request, int rows_per_block) {
  const int group = shape_.heads_per_group();
  const int num_rows = (batch.query_offsets[request + 1] - batch.query_offsets[request]) * group;
  for (int row = 0; row < num_rows; row += rows_per_block) {
    const int row_end = std::min(row + rows_per_block, num_rows);
    const int first_position = batch.start_positions[request] + row / group;
    const int end = batch.start_positions[request] + (row_end - 1) / group + 1;
    const int begin = shape_.window == 0 ? 0 : std::max(0, first_position - shape_.window + 1);
    const int64_t num_tiles = divide_up(end, kTileTokens) - begin / kTileTokens;
    for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
      items_.push_back({request, kv_head, row, row_end, begin / kSplitTokens, int32_t(divide_up(end, kSplitTokens)), -1,
                        num_tiles * (row_end - row + kTileOverheadRows)});
    }
  }
}

bool AttentionSchedule::add_split_rows(AttentionItem whole, int64_t target_cost) {
  const int num_splits = whole.split_end - whole.split_begin;
  const int64_t floats = int64_t(num_splits) * (whole.row_end - whole.row_begin) * partial_floats(shape_.head_dim);
  if (num_splits < 2 || used_partial_floats_ + floats > num_partial_floats_) return false;
  const int num_items = int(std::min<int64_t>(num_splits, divide_up(whole.cost, target_cost)));
  const int32_t merge = int32_t(merges_.size());
  merges_.push_back({whole.split_begin, whole.split_end, num_items, used_partial_floats_});
  num_left_[size_t(merge)].store(num_items, std::memory_order_relaxed);
  used_partial_floats_ += floats;
  for (int i = 0; i < num_items; ++i) {
    AttentionItem item = whole;
    item.split_begin = whole.split_begin + num_splits * i / num_items;
    item.split_end = whole.split_begin + num_splits * (i + 1) / num_items;
    item.merge = merge;
    item.cost = divide_up(whole.cost * (item.split_end - item.split_begin), num_splits);
    items_.push_back(item);
  }
  return true;
}

const AttentionItem* AttentionSchedule::take() {
  const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
  return index < int64_t(items_.size()) ? &items_[size_t(index)] : nullptr;
}

bool AttentionSchedule::finish(int32_t merge) {
  // Acquire and release: the last one sees the partial sums of all others.
  if (num_left_[size_t(merge)].fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  num_left_[size_t(merge)].store(merges_[size_t(merge)].num_items, std::memory_order_relaxed);  // for the next layer
  return true;
}

}  // namespace octavo
