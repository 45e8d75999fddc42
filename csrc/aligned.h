// Memory for vectors: 64-byte aligned, not initialised.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace octavo {

constexpr size_t kVectorAlignment = 64;

struct AlignedBytesDelete {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{kVectorAlignment}); }
};

using AlignedBytes = std::unique_ptr<std::byte[], AlignedBytesDelete>;

inline AlignedBytes aligned_bytes(size_t count) {
  return AlignedBytes(static_cast<std::byte*>(::operator new[](count, std::align_val_t{kVectorAlignment})));
}

}  // namespace octavo
