// Brings the cached keys and values of one sequence and head into the form in which attention multiplies them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache.h"

namespace paceline {

// Keys that are read at a time: their keys and values stay in the cache while the rows of a task pass over them.
inline constexpr int kGroupKeys = 64;
inline constexpr int kGroupHalves = kGroupKeys / kLanes;
static_assert(kGroupKeys % kTileColumns == 0);

// Half a tile of keys, kLanes tokens, as the products want it.
struct Half {
  const int32_t* keys;                  // [words of a key, key_stride]
  const int32_t* values;                // [kLanes / values in a word, value_columns]
  ptrdiff_t key_stride;                 // the same in all halves
  const int32_t* next_keys = nullptr;   // of the half that is as far into what is read next, to be fetched; or null
  const int32_t* next_values = nullptr;
};

// Halves in their order. The partner of a last half that stands alone is that half again.
struct Group {
  Half halves[kGroupHalves];
};

// Keys [begin, end) of a sequence, of one layer and head; begin is a multiple of kGroupKeys.
struct KeyRange {
  int layer, head;
  const int64_t* table;  // the sequence's blocks
  int begin, end;
};

// Finds the keys and values in the sequence's blocks. Where a block is no multiple of a half, tokens are copied. int8
// always, and bfloat16 on demand, is turned into float32, so that what follows is the arithmetic of a float32 cache.
class TileReader {
 public:
  // next: what this thread will probably read after it; as_float32: whatever the cache holds; scratch: memory for copies,
  // kept by the caller from use to use.
  TileReader(const Cache& cache, const KeyRange& range, const std::optional<KeyRange>& next, bool as_float32,
             std::vector<int32_t>& scratch);

  const KeyRange& range() const { return range_; }

  // Up to kGroupKeys tokens from `begin` on, which is a multiple of kGroupKeys within the range. Valid until the next
  // call.
  Group read(int begin);

 private:
  bool in_one_block() const { return size_ % kLanes == 0; }
  Half read_half(int begin, int which);
  Half locate(const KeyRange& range, int token) const;
  std::optional<Half> next_half(int begin) const;
  Half copy(int begin, int count, int32_t* to) const;
  Half convert(int begin, int count, int32_t* to) const;
  void decode_block(int begin, float* keys, float* values) const;
  void decode_token(int token, int index, float* keys, float* values) const;
  void widen_block(int begin, float* keys, float* values) const;
  void widen_token(int token, int index, float* keys, float* values) const;
  void prefetch(const Half& half) const;

  const Cache& cache_;
  const KeyRange range_;
  const std::optional<KeyRange> next_;
  const bool converts_;
  const int size_;                        // tokens in a block
  const size_t key_words_, value_words_;  // of a copied half
  std::vector<int32_t>& scratch_;
};

}  // namespace paceline
