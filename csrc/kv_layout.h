// Where each key and value lies in the KV pool. The only place with offset arithmetic.
//
// A block is one contiguous record over all layers of its group, so that copying, swapping or writing it to disk is
// one memcpy; the same pool serves all groups, whose records have equal size.
//
//     block record    | layer 0                        | layer 1 | ...
//     layer           | KV head 0 | KV head 1 | ...
//     KV head         | tile 0    | tile 1    | ...      block_size / 16 tiles
//     tile            | keys [head_dim][16 tokens] | values [16 tokens][head_dim] |
//     quantised tile  | keys | values | scales of the keys [16 tokens] | scales of the values [16 tokens] |
//     bounded tile    | ... | least of the keys [head_dim] | greatest [head_dim] |      bf16, of whole tiles only
//
// Keys are transposed so that the scores of 16 tokens are two vectors of eight without horizontal sums. Scales are
// bf16, one for a token's key and one for its value; a token's codes share no byte with another token's. int4 packs
// dimensions 2i (low bits) and 2i + 1 of one token into a byte: keys are [head_dim / 2][16 tokens] bytes.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

constexpr int kTileTokens = 16;
constexpr int kMaxHeadDim = 1024;

enum class KvType : uint8_t { f32, f16, bf16, int8, fp8_e4m3, int4 };

constexpr bool is_quantised(KvType type) { return type >= KvType::int8; }

// Queries, keys and values are Hadamard-transformed before they meet this type; see hadamard.h.
constexpr bool is_transformed(KvType type) { return type == KvType::int4; }

// Bytes of a key or value of one token and head, without its scale.
constexpr size_t kv_row_bytes(KvType type, int head_dim) {
  switch (type) {
    case KvType::f32:
      return size_t(head_dim) * 4;
    case KvType::f16:
    case KvType::bf16:
      return size_t(head_dim) * 2;
    case KvType::int8:
    case KvType::fp8_e4m3:
      return size_t(head_dim);
    case KvType::int4:
      return size_t(head_dim) / 2;
  }
  return 0;
}

// Keys and values of one layer.
struct KvLayout {
  KvType type;
  int num_kv_heads;
  int head_dim;             // even for int4
  int block_size;           // tokens; a multiple of 16
  bool has_bounds = false;  // for sparse reading
  size_t layer_at = 0;      // first byte of the layer in the block record
  size_t block_bytes = 0;   // of the whole record

  int tiles_per_block() const { return block_size / kTileTokens; }
  size_t row_bytes() const { return kv_row_bytes(type, head_dim); }
  size_t keys_bytes() const { return size_t(kTileTokens) * row_bytes(); }
  size_t scales_bytes() const { return is_quantised(type) ? size_t(kTileTokens) * sizeof(uint16_t) : 0; }
  size_t bounds_bytes() const { return has_bounds ? 2 * size_t(head_dim) * sizeof(uint16_t) : 0; }
  size_t tile_bytes() const { return 2 * (keys_bytes() + scales_bytes()) + bounds_bytes(); }
  size_t head_bytes() const { return size_t(tiles_per_block()) * tile_bytes(); }
  size_t layer_bytes() const { return size_t(num_kv_heads) * head_bytes(); }

  // Keys of a tile.
  size_t keys_offset(int64_t block_id, int kv_head, int tile) const {
    assert(kv_head < num_kv_heads && tile < tiles_per_block());
    return size_t(block_id) * block_bytes + layer_at + size_t(kv_head) * head_bytes() + size_t(tile) * tile_bytes();
  }
  // The other parts of a tile, relative to its keys.
  size_t values_after_keys() const { return keys_bytes(); }
  size_t key_scales_after_keys() const { return 2 * keys_bytes(); }
  size_t bounds_after_keys() const { return 2 * (keys_bytes() + scales_bytes()); }
  size_t value_scales_after_keys() const { return 2 * keys_bytes() + scales_bytes(); }

  // Items from the start of the keys or values of a tile: numbers, or pairs of int4.
  static size_t key_element(int dim, int place) { return size_t(dim) * kTileTokens + size_t(place); }
  size_t value_row(int place) const { return size_t(place) * row_bytes(); }  // in bytes
};

// The layouts of all layers of a model, whose groups share one pool.
//
// `types`, `bounded`, `groups` and `indices` say of each layer how it is held, whether its tiles have bounds, its KV
// group, and its place in the group's record.
// A layer starts where the ones before it in its group end; the record is as long as the longest group needs.
inline std::vector<KvLayout> lay_out_layers(const std::vector<KvType>& types, const std::vector<bool>& bounded,
                                            const std::vector<int>& groups, const std::vector<int>& indices,
                                            KvLayout plain) {
  std::vector<KvLayout> layouts;
  size_t block_bytes = 0;
  for (size_t layer = 0; layer < types.size(); ++layer) {
    KvLayout layout = plain;
    layout.type = types[layer];
    layout.has_bounds = bounded[layer];
    layout.layer_at = 0;
    for (size_t other = 0; other < types.size(); ++other) {
      if (groups[other] != groups[layer] || indices[other] >= indices[layer]) continue;
      KvLayout before = plain;
      before.type = types[other];
      before.has_bounds = bounded[other];
      layout.layer_at += before.layer_bytes();
    }
    block_bytes = std::max(block_bytes, layout.layer_at + layout.layer_bytes());
    layouts.push_back(layout);
  }
  for (KvLayout& layout : layouts) layout.block_bytes = block_bytes;
  return layouts;
}

}  // namespace octavo
