// The division of a step's attention among the threads; made once per step and KV group, used by all its layers.
//
//   requests that hold the same blocks      split 0         split 1         split 2
//     a  ...................................[ shared item  ][ shared item  ][ item of a ]
//     b  ...................................[  of a, b, c  ][   of a, b    ][ item of b ]
//     c  ...................................[              ][ item of c                 ]
//
// Rows of several requests whose tables name the same blocks in a whole split visit them together: the tiles are read
// once, and more rows make fuller register tiles. Long row blocks are cut between splits, so that threads share them.
// In both cases a row's splits are computed by several items, which leave partial sums; whoever finishes last merges
// them from left to right. Neither changes a bit.
//
// Rows that read sparsely choose their tiles once, so one item computes all their splits. Of few items those that would
// leave a thread without work at the end are cut by rows, each of which has tiles of its own anyway.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

namespace octavo {

struct AttentionRow {
  int32_t request;
  int32_t row;    // within its request
  int32_t merge;  // of KV head 0, those of the other heads follow; -1: the item covers all splits of the row
};

// A piece of work: rows of one KV head against some splits, through the block table of the first row's request.
struct AttentionItem {
  int32_t kv_head;
  int32_t first_row;  // in the rows of the schedule; rows of a request are together and ascend
  int32_t num_rows;
  int32_t split_begin;
  int32_t split_end;
  int64_t cost;
};

// Rows of one request and KV head whose splits several items compute.
struct AttentionMerge {
  int32_t kv_head;
  int32_t request;
  int32_t row_begin;
  int32_t row_end;
  int32_t split_begin;
  int32_t split_end;
  int32_t num_items;
  int64_t partials;  // first float of its area: per split (then the sinks) and row the sums, then weight and maximum
};

inline int64_t partial_floats(int head_dim) { return padded_head_dim(head_dim) + 8; }

// All memory is taken in the constructor; what does not fit into the area of partial sums is computed undivided.
class AttentionSchedule {
 public:
  // Requests of more than `sparse_tiles` tiles read sparsely; 0: none does.
  AttentionSchedule(AttentionShape shape, int sparse_tiles, int max_tokens, int max_requests, int num_threads);

  void build(const AttentionBatch& batch, int block_size);
  // Items may be computed in any order, each once per use; the first ones are the dearest.
  int64_t num_items() const { return static_cast<int64_t>(items_.size()); }
  const AttentionItem& item(int64_t index) const { return items_[static_cast<size_t>(index)]; }
  // Whether the caller finished the last item of a merge, so that all partial sums are there.
  bool finish(int32_t merge);

  const AttentionRow* rows() const { return rows_.data(); }
  const AttentionMerge& merge(int32_t index) const { return merges_[static_cast<size_t>(index)]; }
  float* partials() { return partials_.get(); }
  size_t num_shared_items() const { return shares_.size() * static_cast<size_t>(shape_.num_kv_heads); }
  size_t resident_bytes() const;

 private:
  // Rows of one request, all of whose splits one item could compute.
  struct RowBlock {
    int request;
    int row_begin;
    int row_end;
    int split_begin;
    int split_end;
    bool is_sparse;
    int64_t cost;  // per KV head
  };
  // Requests whose rows visit a split together: a range of `members_`.
  struct Share {
    int32_t split;
    int32_t first;
    int32_t count;
  };

  int rows_per_block(const AttentionBatch& batch) const;
  bool is_sparse(const AttentionBatch& batch, int request) const;
  RowBlock block_of(const AttentionBatch& batch, int request, int row_begin, int row_end) const;
  int num_rows(const AttentionBatch& batch, int request) const;
  int num_full_splits(const AttentionBatch& batch, int request) const;
  int64_t floats_of_partials(const RowBlock& block) const;
  void find_shares(const AttentionBatch& batch, int block_size, int max_rows);
  void share_split(const AttentionBatch& batch, int block_size, int split, int max_rows);
  void close_share(const AttentionBatch& batch, int split, size_t begin, size_t end, int max_rows);
  void add_block(const RowBlock& block, int num_shared_splits);
  int32_t add_merges(const RowBlock& block, int num_items);
  void add_items(const RowBlock& block, int split_begin, int split_end, int num_items, int32_t merge);
  void add_shared_items(const AttentionBatch& batch);

  AttentionShape shape_;
  int sparse_tiles_;
  int num_threads_;
  int64_t target_cost_ = 0;      // above which a row block is cut
  int64_t num_whole_items_ = 0;  // so many are left; those after them are cut where rows read sparsely
  int64_t used_floats_ = 0;      // of partial sums, promised to row blocks
  int64_t next_partial_ = 0;     // first float that no merge has yet
  std::vector<AttentionRow> rows_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionMerge> merges_;
  std::vector<Share> shares_;
  std::vector<int32_t> members_;
  std::vector<int32_t> candidates_;      // requests that shared all splits so far
  std::vector<int32_t> shared_splits_;   // by request: leading splits computed by shared items
  std::vector<int32_t> request_merges_;  // by request, of those with shared splits
  std::unique_ptr<std::atomic<int32_t>[]> num_left_;
  std::unique_ptr<float[]> partials_;
};

}  // namespace octavo
