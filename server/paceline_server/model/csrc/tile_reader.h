// Brings the cached keys and values of one sequence and head into the form in which attention multiplies them.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.h"

namespace paceline {

// Half a tile of keys, kLanes tokens, as the products want it.
struct Half {
  const int32_t* keys;    // [words of a key, key_stride]
  const int32_t* values;  // [kLanes / values in a word, value_columns]
  ptrdiff_t key_stride;
};

// Finds the halves of tiles in the sequence's blocks. Where a block is no multiple of a half, tokens are copied; int8 is
// turned into float32, so that what follows is the arithmetic of a float32 cache.
class TileReader {
 public:
  // table: the sequence's blocks; scratch: memory for copies, kept by the caller from use to use.
  TileReader(const Cache& cache, int layer, int head, const int64_t* table, std::vector<int32_t>& scratch);

  // Tokens [begin, begin + count), 1 <= count <= kLanes, begin a multiple of kLanes; which: 0 or 1, the half of the tile.
  Half read(int begin, int count, int which);

  // Fetch what `read` will look at, ahead of time.
  void prefetch(int begin) const;

 private:
  bool in_one_block() const { return size_ % kLanes == 0; }
  Half copy(int begin, int count, int which);
  Half decode(int begin, int count, int which);
  void decode_block(int begin, float* keys, float* values) const;
  void decode_token(int token, int index, float* keys, float* values) const;

  const Cache& cache_;
  const int layer_, head_;
  const int64_t* const table_;
  const int size_;  // tokens in a block
  const size_t key_words_, value_words_;  // of a copied half
  std::vector<int32_t>& scratch_;
};

}  // namespace paceline
