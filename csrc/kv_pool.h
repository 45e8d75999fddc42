// The memory of all KV blocks: mapped once, committed by the system as blocks are first written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_layout.h"

namespace octavo {

class KvPool {
 public:
  // Maps `num_blocks` usable blocks and the null block 0, which is never touched. Throws std::bad_alloc.
  KvPool(const KvLayout& layout, int64_t num_blocks);
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  const KvLayout& layout() const { return layout_; }
  int64_t num_blocks() const { return num_blocks_; }  // usable ones: ids 1 .. num_blocks
  size_t mapped_bytes() const { return mapped_bytes_; }
  std::byte* data() const { return data_; }
  std::byte* block(int64_t block_id) const { return data_ + size_t(block_id) * layout_.block_bytes(); }

  // Commits the memory of all usable blocks now.
  void prefault();
  // Fills a block with NaN of its type, so that reading an unwritten place shows.
  void poison(int64_t block_id);

 private:
  const KvLayout layout_;
  const int64_t num_blocks_;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace octavo
