// Memory of packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace octavo {

// Returns `num_bytes` of uninitialised memory, 64-byte aligned, freed with the last owner.
//
// Tensors are carved from large chunks that ask the system for huge pages: a decode step reads all weights once, and
// with 4 KiB pages the hardware's prefetchers stop at every page (12 % less read bandwidth measured). Only touched
// pages count as resident. Thread-safe.
std::shared_ptr<uint8_t[]> weight_memory(size_t num_bytes);

}  // namespace octavo
