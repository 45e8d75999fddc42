#include "attention_schedule.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

namespace octavo {
namespace {

// Items per thread that balance well without making row blocks small.
constexpr int kItemsPerThread = 4;
constexpr int kMinRowsPerBlock = 12;
constexpr int kRowMultiple = 6;
// Rows that visit a split together at least: shared splits are items of their own, so there are enough of those.
constexpr int kMinSharedRows = 24;
// Visiting a tile costs about as much as computing this many rows with it.
constexpr int64_t kTileOverheadRows = 4;
// Choosing among this many tiles costs about as much as reading one.
constexpr int64_t kChosenAmong = 16;
// 4 MiB of partial sums: 30 heads of 128 dimensions over 128,000 tokens.
constexpr int64_t kPartialFloats = int64_t(1) << 20;
constexpr size_t kMaxShares = 1024;
constexpr size_t kMaxSharedRows = 8192;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// The part of a block table that covers a split.
struct TablePart {
  const int32_t* ids;
  int64_t count;

  bool operator==(const TablePart& other) const {
    return count == other.count && std::memcmp(ids, other.ids, size_t(count) * sizeof(int32_t)) == 0;
  }
};

TablePart table_part(const AttentionBatch& batch, int request, int split, int block_size) {
  const int64_t begin = int64_t(split) * kSplitTokens / block_size;
  const int64_t end = divide_up(int64_t(split + 1) * kSplitTokens, block_size);
  return {batch.block_ids + batch.table_offsets[request] + begin, end - begin};
}

}  // namespace

size_t attention_scratch_floats(int head_dim) {
  const auto area = [](int64_t count) { return size_t(round_up(count, 16)); };
  const int dims = padded_head_dim(head_dim);
  return area(int64_t(kMaxRowsPerBlock) * head_dim) + area(int64_t(kTileTokens) * head_dim) +
         area(int64_t(kTileTokens) * head_dim + 8) +
         2 * (area(int64_t(kMaxRowsPerBlock) * dims) + area(kMaxRowsPerBlock * 8) + area(kMaxRowsPerBlock));
}

size_t selection_scratch_floats(int head_dim, int64_t max_tiles) {
  const int64_t num_words = divide_up(max_tiles, 32);
  return size_t(int64_t(kMaxRowsPerBlock + kBoundedTiles) * 2 * padded_bounds(head_dim) +
                int64_t(kMaxRowsPerBlock) * (32 + 1 + 32) * num_words);
}

AttentionSchedule::AttentionSchedule(AttentionShape shape, int sparse_tiles, int max_tokens, int max_requests,
                                     int num_threads)
    : shape_(shape), sparse_tiles_(sparse_tiles), num_threads_(num_threads) {
  const int64_t num_kv_heads = shape.num_kv_heads;
  const int64_t max_rows = int64_t(max_tokens) * shape.heads_per_group();
  const int64_t max_blocks = divide_up(max_rows, kMinRowsPerBlock) + max_requests;
  // Row blocks above the target cost are fewer than the items wanted; each is cut into at most cost / target + 1.
  const int64_t max_cut = int64_t(num_threads) * kItemsPerThread + num_kv_heads;
  const int64_t max_single_rows = sparse_tiles == 0 ? 0 : num_threads * kMaxRowsPerBlock;
  const int64_t max_merges = max_cut + max_requests * num_kv_heads;
  rows_.reserve(size_t(max_rows) + kMaxSharedRows);
  items_.reserve(size_t(max_blocks * num_kv_heads + 2 * max_cut + max_single_rows) + kMaxShares * size_t(num_kv_heads));
  merges_.reserve(size_t(max_merges));
  shares_.reserve(kMaxShares);
  members_.reserve(kMaxSharedRows);
  candidates_.reserve(size_t(max_requests));
  shared_splits_.reserve(size_t(max_requests));
  request_merges_.reserve(size_t(max_requests));
  num_left_ = std::make_unique<std::atomic<int32_t>[]>(size_t(max_merges));
  partials_ = std::make_unique_for_overwrite<float[]>(size_t(kPartialFloats));
}

size_t AttentionSchedule::resident_bytes() const {
  return rows_.capacity() * sizeof(AttentionRow) + items_.capacity() * sizeof(AttentionItem) +
         merges_.capacity() * (sizeof(AttentionMerge) + sizeof(int32_t)) + size_t(kPartialFloats) * sizeof(float);
}

void AttentionSchedule::build(const AttentionBatch& batch, int block_size) {
  rows_.clear();
  items_.clear();
  merges_.clear();
  used_floats_ = 0;
  next_partial_ = 0;
  const int max_rows = rows_per_block(batch);
  int64_t total_cost = 0;
  num_whole_items_ = 0;
  for (int request = 0; request < batch.num_requests; ++request) {
    for (int row = 0; row < num_rows(batch, request); row += max_rows) {
      total_cost += block_of(batch, request, row, std::min(row + max_rows, num_rows(batch, request))).cost;
      num_whole_items_ += shape_.num_kv_heads;
    }
  }
  if (num_whole_items_ < num_threads_ * kItemsPerThread) num_whole_items_ -= num_whole_items_ % num_threads_;
  target_cost_ = divide_up(total_cost * shape_.num_kv_heads, int64_t(num_threads_) * kItemsPerThread);
  find_shares(batch, block_size, std::max(max_rows, kMinSharedRows));
  for (int request = 0; request < batch.num_requests; ++request) {
    for (int row = 0; row < num_rows(batch, request); row += max_rows) {
      const RowBlock block = block_of(batch, request, row, std::min(row + max_rows, num_rows(batch, request)));
      add_block(block, shared_splits_[size_t(request)]);
    }
  }
  add_shared_items(batch);
  // Dear ones first, so that threads finish together. Among about equal ones a KV head at a time, so that blocks that
  // several row blocks read come from the cache.
  const auto magnitude = [](const AttentionItem& item) { return std::bit_width(uint64_t(item.cost)); };
  std::sort(items_.begin(), items_.end(), [&](const AttentionItem& a, const AttentionItem& b) {
    return std::tuple(-magnitude(a), a.kv_head, a.split_begin, a.first_row) <
           std::tuple(-magnitude(b), b.kv_head, b.split_begin, b.first_row);
  });
}

int AttentionSchedule::rows_per_block(const AttentionBatch& batch) const {
  const int64_t num_rows = int64_t(batch.query_offsets[batch.num_requests]) * shape_.heads_per_group();
  const int64_t num_blocks = divide_up(int64_t(num_threads_) * kItemsPerThread, shape_.num_kv_heads);
  return int(
      std::clamp<int64_t>(round_up(divide_up(num_rows, num_blocks), kRowMultiple), kMinRowsPerBlock, kMaxRowsPerBlock));
}

bool AttentionSchedule::is_sparse(const AttentionBatch& batch, int request) const {
  const int end = batch.start_positions[request] + batch.num_queries(request);
  return sparse_tiles_ > 0 && divide_up(end, kTileTokens) > sparse_tiles_;
}

int AttentionSchedule::num_rows(const AttentionBatch& batch, int request) const {
  return batch.num_queries(request) * shape_.heads_per_group();
}

AttentionSchedule::RowBlock AttentionSchedule::block_of(const AttentionBatch& batch, int request, int row_begin,
                                                        int row_end) const {
  const int group = shape_.heads_per_group();
  const int first_position = batch.start_positions[request] + row_begin / group;
  const int end = batch.start_positions[request] + (row_end - 1) / group + 1;
  const int begin = shape_.visible_begin(first_position);
  const int64_t num_tiles = divide_up(end, kTileTokens) - begin / kTileTokens;
  const int64_t num_read = is_sparse(batch, request) ? sparse_tiles_ + num_tiles / kChosenAmong : num_tiles;
  return {request,
          row_begin,
          row_end,
          begin / kSplitTokens,
          int(divide_up(end, kSplitTokens)),
          is_sparse(batch, request),
          num_read * (row_end - row_begin + kTileOverheadRows)};
}

// Splits that all rows of a request see to the end.
int AttentionSchedule::num_full_splits(const AttentionBatch& batch, int request) const {
  return (batch.start_positions[request] + 1) / kSplitTokens;
}

int64_t AttentionSchedule::floats_of_partials(const RowBlock& block) const {
  const int num_parts = block.split_end - block.split_begin + (shape_.num_sinks > 0 ? 1 : 0);
  return int64_t(num_parts) * (block.row_end - block.row_begin) * partial_floats(shape_.head_dim) * shape_.num_kv_heads;
}

// Finds requests of few rows that hold the same blocks, split by split from the left.
void AttentionSchedule::find_shares(const AttentionBatch& batch, int block_size, int max_rows) {
  shares_.clear();
  members_.clear();
  candidates_.clear();
  shared_splits_.assign(size_t(batch.num_requests), 0);
  request_merges_.assign(size_t(batch.num_requests), -1);
  if (shape_.window != 0) return;
  for (int request = 0; request < batch.num_requests; ++request) {
    const int rows = num_rows(batch, request);
    if (rows == 0 || rows > max_rows / 2 || is_sparse(batch, request)) continue;
    if (num_full_splits(batch, request) > 0) candidates_.push_back(request);
  }
  for (int split = 0; candidates_.size() > 1; ++split) {
    share_split(batch, block_size, split, max_rows);
    std::erase_if(candidates_, [&](int32_t request) {
      return shared_splits_[size_t(request)] <= split || num_full_splits(batch, request) <= split + 1;
    });
  }
}

void AttentionSchedule::share_split(const AttentionBatch& batch, int block_size, int split, int max_rows) {
  const auto part = [&](int32_t request) { return table_part(batch, request, split, block_size); };
  std::sort(candidates_.begin(), candidates_.end(),
            [&](int32_t a, int32_t b) { return std::tuple(part(a).ids[0], a) < std::tuple(part(b).ids[0], b); });
  for (size_t begin = 0; begin < candidates_.size();) {
    size_t end = begin + 1;
    while (end < candidates_.size() && part(candidates_[end]) == part(candidates_[begin])) ++end;
    if (end - begin > 1) close_share(batch, split, begin, end, max_rows);
    begin = end;
  }
}

// Lets the requests candidates_[begin, end) visit a split together, in row blocks of at most `max_rows`.
void AttentionSchedule::close_share(const AttentionBatch& batch, int split, size_t begin, size_t end, int max_rows) {
  int rows = 0;
  bool is_open = false;
  for (size_t i = begin; i < end; ++i) {
    const int32_t request = candidates_[i];
    const int count = num_rows(batch, request);
    const int64_t floats = floats_of_partials(block_of(batch, request, 0, count));
    const bool is_new = shared_splits_[size_t(request)] == 0;
    if (is_new && used_floats_ + floats > kPartialFloats) continue;
    if ((members_.size() + 1) * size_t(max_rows) > kMaxSharedRows) return;
    if (!is_open || rows + count > max_rows) {
      if (shares_.size() == kMaxShares) return;
      shares_.push_back({split, int32_t(members_.size()), 0});
      is_open = true;
      rows = 0;
    }
    if (is_new) used_floats_ += floats;
    members_.push_back(request);
    ++shares_.back().count;
    rows += count;
    shared_splits_[size_t(request)] = split + 1;
  }
}

void AttentionSchedule::add_block(const RowBlock& block, int num_shared_splits) {
  const int split_begin = block.split_begin + num_shared_splits;  // shared rows have no window: they begin at split 0
  const int num_splits = block.split_end - split_begin;
  int num_items = 1;
  if (num_threads_ > 1 && block.cost > target_cost_ && !block.is_sparse) {
    num_items = int(std::min<int64_t>(num_splits, divide_up(block.cost, target_cost_)));
  }
  num_items = std::min(num_items, num_splits);  // none is left when all splits are shared
  if (num_shared_splits > 0) {
    request_merges_[size_t(block.request)] = add_merges(block, num_items + num_shared_splits);
    add_items(block, split_begin, block.split_end, num_items, request_merges_[size_t(block.request)]);
    return;
  }
  const int64_t floats = floats_of_partials(block);
  if (num_items > 1 && used_floats_ + floats <= kPartialFloats) {
    used_floats_ += floats;
    add_items(block, split_begin, block.split_end, num_items, add_merges(block, num_items));
  } else {
    add_items(block, split_begin, block.split_end, 1, -1);
  }
}

// Adds the merges of a row block for all KV heads; returns the first.
int32_t AttentionSchedule::add_merges(const RowBlock& block, int num_items) {
  const int32_t first = int32_t(merges_.size());
  for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
    num_left_[merges_.size()].store(num_items, std::memory_order_relaxed);
    merges_.push_back({kv_head, block.request, block.row_begin, block.row_end, block.split_begin, block.split_end,
                       num_items, next_partial_});
    next_partial_ += floats_of_partials(block) / shape_.num_kv_heads;
  }
  return first;
}

// Adds items for splits [split_begin, split_end) of a row block, for all KV heads.
void AttentionSchedule::add_items(const RowBlock& block, int split_begin, int split_end, int num_items, int32_t merge) {
  const int32_t first_row = int32_t(rows_.size());
  const int num_splits = split_end - split_begin;
  for (int row = block.row_begin; row < block.row_end; ++row) rows_.push_back({block.request, row, merge});
  for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
    const bool is_whole = num_whole_items_-- > 0;
    if (block.is_sparse && !is_whole) {
      const int count = block.row_end - block.row_begin;
      for (int i = 0; i < count; ++i) {
        items_.push_back({kv_head, first_row + i, 1, split_begin, split_end, divide_up(block.cost, count)});
      }
      continue;
    }
    for (int i = 0; i < num_items; ++i) {
      const int begin = split_begin + num_splits * i / num_items;
      const int end = split_begin + num_splits * (i + 1) / num_items;
      const int64_t cost = divide_up(block.cost * (end - begin), block.split_end - block.split_begin);
      items_.push_back({kv_head, first_row, block.row_end - block.row_begin, begin, end, cost});
    }
  }
}

void AttentionSchedule::add_shared_items(const AttentionBatch& batch) {
  for (const Share& share : shares_) {
    const int32_t first_row = int32_t(rows_.size());
    for (int32_t i = share.first; i < share.first + share.count; ++i) {
      const int32_t request = members_[size_t(i)];
      for (int row = 0; row < num_rows(batch, request); ++row) {
        rows_.push_back({request, row, request_merges_[size_t(request)]});
      }
    }
    const int32_t count = int32_t(rows_.size()) - first_row;
    for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
      items_.push_back(
          {kv_head, first_row, count, share.split, share.split + 1, kTilesPerSplit * (count + kTileOverheadRows)});
    }
  }
}

bool AttentionSchedule::finish(int32_t merge) {
  // Acquire and release: the last one sees the partial sums of all others.
  if (num_left_[size_t(merge)].fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  num_left_[size_t(merge)].store(merges_[size_t(merge)].num_items, std::memory_order_relaxed);  // for the next layer
  return true;
}

}  // namespace octavo
