#include "linear_memory.h"

#include <algorithm>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{32} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Chunk {
  explicit Chunk(size_t num_bytes)
      : bytes(static_cast<uint8_t*>(::operator new[](num_bytes, std::align_val_t{kHugePage}))), size(num_bytes) {
#if defined(__linux__)
    madvise(bytes, size, MADV_HUGEPAGE);  // advice: without it everything works, slower
#endif
  }
  ~Chunk() { ::operator delete[](bytes, std::align_val_t{kHugePage}); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  uint8_t* const bytes;
  const size_t size;
  size_t used = 0;
};

}  // namespace

std::shared_ptr<uint8_t[]> weight_memory(size_t num_bytes) {
  // An allocator's state, like that of malloc. Weak: a model that is let go takes its chunks with it.
  static std::mutex mutex;
  static std::weak_ptr<Chunk> newest;

  const size_t needed = round_up(num_bytes, kAlignment);
  const std::lock_guard lock(mutex);
  std::shared_ptr<Chunk> chunk = newest.lock();
  if (chunk == nullptr || chunk->size - chunk->used < needed) {
    chunk = std::make_shared<Chunk>(std::max(kChunk, round_up(needed, kHugePage)));
    newest = chunk;
  }
  uint8_t* const begin = chunk->bytes + chunk->used;
  chunk->used += needed;
  return {chunk, begin};
}

}  // namespace octavo
