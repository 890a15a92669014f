// The paged KV cache, laid out for the products of attention (tile.h).
//
// A block holds, for each layer and key/value head, its keys and then its values:
//   keys   [head_dim / P, block_size] words: scores of neighbouring tokens are neighbouring lanes, no sum across lanes
//   values [block_size / P, value_columns] words: so are the elements of the output
// where a word of four bytes has P = 1 float32, 2 bfloat16 or 4 int8 numbers: of a key, neighbouring elements; of
// values, the same element of neighbouring tokens. int8 has a scale for each token's key and one for its value:
//   scales [2, block_size] float32, behind the values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "memory.h"
#include "simd.h"

namespace paceline {

enum class CacheFormat : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

struct CacheShape {
  int32_t layers;
  int32_t blocks;
  int32_t block_size;  // tokens
  int32_t kv_heads;
  int32_t head_dim;
  CacheFormat format;
};

class Cache {
 public:
  // Claims its memory with the pool's threads.
  Cache(Pool& pool, const CacheShape& shape);

  const CacheShape& shape() const { return shape_; }
  CacheFormat format() const { return shape_.format; }
  int key_rows() const { return (shape_.head_dim + values_per_word_ - 1) / values_per_word_; }
  int value_rows() const { return (shape_.block_size + values_per_word_ - 1) / values_per_word_; }
  int value_columns() const { return value_columns_; }
  int values_per_word() const { return values_per_word_; }

  // [key_rows, block_size]
  int32_t* keys(int layer, int64_t block, int head) const {
    return data_.get() + ((int64_t(layer) * shape_.blocks + block) * shape_.kv_heads + head) * head_words_;
  }
  // [value_rows, value_columns]
  int32_t* values(int layer, int64_t block, int head) const { return keys(layer, block, head) + key_words_; }
  // [2, block_size]: of the keys, of the values; int8 alone
  float* scales(int layer, int64_t block, int head) const {
    return reinterpret_cast<float*>(values(layer, block, head) + value_words_);
  }

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
  void write(int layer, int64_t slot, int head, const float* key, const float* value) const;

 private:
  CacheShape shape_;
  int values_per_word_;
  int value_columns_;
  ptrdiff_t key_words_;
  ptrdiff_t value_words_;
  ptrdiff_t head_words_;
  Mapping<int32_t> data_;
};

}  // namespace paceline
