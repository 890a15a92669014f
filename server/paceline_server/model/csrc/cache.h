// The paged KV cache, laid out for the products of attention (tile.h).
//
// A block holds, for each layer and key/value head, its keys and then its values:
//   keys   [head_dim / P, block_size] words: scores of neighbouring tokens are neighbouring lanes, no sum across lanes
//   values [block_size / P, value_columns] words: so are the elements of the output
// where a word of four bytes has P = 1 float32 or P = 2 bfloat16 numbers: of a key, neighbouring elements; of values,
// the same element of neighbouring tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "memory.h"
#include "simd.h"

namespace paceline {

struct CacheShape {
  int32_t layers;
  int32_t blocks;
  int32_t block_size;  // tokens
  int32_t kv_heads;
  int32_t head_dim;
  int32_t bfloat16;  // else float32
};

class Cache {
 public:
  explicit Cache(const CacheShape& shape)
      : shape_(shape),
        values_per_word_(shape.bfloat16 ? 2 : 1),
        value_columns_((shape.head_dim + kTileColumns - 1) / kTileColumns * kTileColumns),
        key_words_(ptrdiff_t(key_rows()) * shape.block_size),
        head_words_(key_words_ + ptrdiff_t(value_rows()) * value_columns_) {
    // Zeros, because what was never written must be finite: a masked score's probability of 0 is multiplied with it.
    data_ = allocate_zeros<int32_t>(size_t(shape.layers) * shape.blocks * shape.kv_heads * head_words_);
  }

  const CacheShape& shape() const { return shape_; }
  bool bfloat16() const { return shape_.bfloat16 != 0; }
  int key_rows() const { return (shape_.head_dim + values_per_word_ - 1) / values_per_word_; }
  int value_rows() const { return (shape_.block_size + values_per_word_ - 1) / values_per_word_; }
  int value_columns() const { return value_columns_; }
  int values_per_word() const { return values_per_word_; }
  ptrdiff_t head_words() const { return head_words_; }

  // [key_rows, block_size]
  int32_t* keys(int layer, int64_t block, int head) const {
    return data_.get() + ((int64_t(layer) * shape_.blocks + block) * shape_.kv_heads + head) * head_words_;
  }
  // [value_rows, value_columns]
  int32_t* values(int layer, int64_t block, int head) const { return keys(layer, block, head) + key_words_; }

  // A block as a whole: each layer's part of it is contiguous.
  size_t layer_bytes() const { return sizeof(int32_t) * static_cast<size_t>(shape_.kv_heads * head_words_); }
  size_t block_bytes() const { return layer_bytes() * static_cast<size_t>(shape_.layers); }
  void copy_block(int64_t source, int64_t target) const {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::memcpy(keys(layer, target, 0), keys(layer, source, 0), layer_bytes());
    }
  }
  // host: block_bytes() of memory outside the cache
  void save_block(int64_t block, char* host) const {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::memcpy(host + layer * layer_bytes(), keys(layer, block, 0), layer_bytes());
    }
  }
  void load_block(const char* host, int64_t block) const {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::memcpy(keys(layer, block, 0), host + layer * layer_bytes(), layer_bytes());
    }
  }

  // Store a token's key and value of one head, [head_dim] each. slot: block * block_size + place in the block.
  void write(int layer, int64_t slot, int head, const float* key, const float* value) const {
    const int size = shape_.block_size, dim = shape_.head_dim;
    const int64_t block = slot / size, place = slot % size;
    int32_t* const key_words = keys(layer, block, head) + place;
    int32_t* const value_words = values(layer, block, head) + place / values_per_word_ * value_columns_;
    if (!bfloat16()) {
      for (int d = 0; d < dim; ++d) key_words[ptrdiff_t(d) * size] = std::bit_cast<int32_t>(key[d]);
      std::memcpy(value_words, value, sizeof(float) * static_cast<size_t>(dim));
      return;
    }
    for (int d = 0; d < dim; d += 2) {
      const uint32_t high = d + 1 < dim ? to_bfloat16(key[d + 1]) : 0;
      key_words[ptrdiff_t(d / 2) * size] = static_cast<int32_t>(high << 16 | to_bfloat16(key[d]));
    }
    uint16_t* const halves = reinterpret_cast<uint16_t*>(value_words) + place % 2;
    for (int d = 0; d < dim; ++d) halves[ptrdiff_t(2) * d] = to_bfloat16(value[d]);
  }

 private:
  CacheShape shape_;
  int values_per_word_;
  int value_columns_;
  ptrdiff_t key_words_;
  ptrdiff_t head_words_;
  Memory<int32_t> data_;
};

}  // namespace paceline
