// Brings the cached keys and values of one sequence and head into the form in which attention multiplies them.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.h"

namespace paceline {

// Keys that are read at a time: their keys and values stay in the cache while the rows of a task pass over them.
inline constexpr int kGroupKeys = 64;
inline constexpr int kGroupHalves = kGroupKeys / kLanes;
static_assert(kGroupKeys % kTileColumns == 0);

// Half a tile of keys, kLanes tokens, as the products want it.
struct Half {
  const int32_t* keys;         // [words of a key, key_stride]
  const int32_t* values;       // [kLanes / values in a word, value_columns]
  ptrdiff_t key_stride;        // the same in all halves
  const int32_t* next_keys;    // of the half that is as far into the next group, to be fetched; or null
  const int32_t* next_values;
};

// Halves in their order. The partner of a last half that stands alone is that half again.
struct Group {
  Half halves[kGroupHalves];
};

// Finds the keys and values in the sequence's blocks. Where a block is no multiple of a half, tokens are copied. int8
// always, and bfloat16 on demand, is turned into float32, so that what follows is the arithmetic of a float32 cache.
class TileReader {
 public:
  // table: the sequence's blocks; end: tokens that may be read; as_float32: whatever the cache holds; scratch: memory for
  // copies, kept by the caller from use to use.
  TileReader(const Cache& cache, int layer, int head, const int64_t* table, int end, bool as_float32,
             std::vector<int32_t>& scratch);

  // Up to kGroupKeys tokens from `begin` on, a multiple of kGroupKeys below `end`. Valid until the next call.
  Group read(int begin);

 private:
  bool in_one_block() const { return size_ % kLanes == 0; }
  Half read_half(int begin, int which);
  Half locate(int begin) const;
  Half copy(int begin, int count, int32_t* to) const;
  Half convert(int begin, int count, int32_t* to) const;
  void decode_block(int begin, float* keys, float* values) const;
  void decode_token(int token, int index, float* keys, float* values) const;
  void widen_block(int begin, float* keys, float* values) const;
  void widen_token(int token, int index, float* keys, float* values) const;
  void prefetch(int begin) const;

  const Cache& cache_;
  const int layer_, head_;
  const int64_t* const table_;
  const int end_;
  const bool converts_;
  const int size_;                        // tokens in a block
  const size_t key_words_, value_words_;  // of a copied half
  std::vector<int32_t>& scratch_;
};

}  // namespace paceline
