// The memory of all KV blocks: mapped once, committed by the system as blocks are first written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

class KvPool {
 public:
  // Maps `num_blocks` usable blocks and the null block 0, which is never touched. Throws std::bad_alloc.
  KvPool(size_t block_bytes, int64_t num_blocks);
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  size_t block_bytes() const { return block_bytes_; }
  int64_t num_blocks() const { return num_blocks_; }  // usable ones: ids 1 .. num_blocks
  size_t mapped_bytes() const { return mapped_bytes_; }
  std::byte* data() const { return data_; }
  std::byte* block(int64_t block_id) const { return data_ + size_t(block_id) * block_bytes_; }

  // Commits the memory of all usable blocks now.
  void prefault();
  // Fills a block with NaN, whatever its types, so that reading an unwritten place shows.
  void poison(int64_t block_id);

 private:
  const size_t block_bytes_;
  const int64_t num_blocks_;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace octavo
