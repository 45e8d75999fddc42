// Where each key and value lies in the KV pool. The only place with offset arithmetic.
//
// A block is one contiguous record over all layers of its group, so that copying, swapping or writing it to disk is
// one memcpy; the same pool serves all groups, whose records have equal size.
//
//     block record    | layer 0                        | layer 1 | ...
//     layer           | KV head 0 | KV head 1 | ...
//     KV head         | tile 0    | tile 1    | ...      block_size / 16 tiles
//     tile            | keys [head_dim][16 tokens] | values [16 tokens][head_dim] |
//
// Keys are transposed so that the scores of 16 tokens are two vectors of eight without horizontal sums.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kTileTokens = 16;

enum class KvType : uint8_t { f32, f16, bf16 };

constexpr size_t kv_element_bytes(KvType type) { return type == KvType::f32 ? 4 : 2; }

struct KvLayout {
  KvType type;
  int num_layers;  // of one group, padding included
  int num_kv_heads;
  int head_dim;
  int block_size;  // tokens; a multiple of 16

  int tiles_per_block() const { return block_size / kTileTokens; }
  size_t element_bytes() const { return kv_element_bytes(type); }
  size_t keys_bytes() const { return size_t(kTileTokens) * size_t(head_dim) * element_bytes(); }
  size_t tile_bytes() const { return 2 * keys_bytes(); }
  size_t head_bytes() const { return size_t(tiles_per_block()) * tile_bytes(); }
  size_t layer_bytes() const { return size_t(num_kv_heads) * head_bytes(); }
  size_t block_bytes() const { return size_t(num_layers) * layer_bytes(); }

  // Keys of a tile; `layer` counts within the group.
  size_t keys_offset(int64_t block_id, int layer, int kv_head, int tile) const {
    assert(layer < num_layers && kv_head < num_kv_heads && tile < tiles_per_block());
    return size_t(block_id) * block_bytes() + size_t(layer) * layer_bytes() + size_t(kv_head) * head_bytes() +
           size_t(tile) * tile_bytes();
  }
  // Values of a tile, relative to its keys.
  size_t values_after_keys() const { return keys_bytes(); }

  // Elements from the start of the keys or values of a tile.
  static size_t key_element(int dim, int place) { return size_t(dim) * kTileTokens + size_t(place); }
  size_t value_element(int place) const { return size_t(place) * size_t(head_dim); }
};

}  // namespace octavo
