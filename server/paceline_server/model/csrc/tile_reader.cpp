#include "tile_reader.h"

#include <algorithm>
#include <cstring>

namespace paceline {
namespace {

// Byte `number` of each word, with its sign, as float32.
Floats byte_of(Ints words, int number) {
  return __builtin_convertvector((words << (24 - 8 * number)) >> 24, Floats);
}

}  // namespace

TileReader::TileReader(const Cache& cache, int layer, int head, const int64_t* table, std::vector<int32_t>& scratch)
    : cache_(cache),
      layer_(layer),
      head_(head),
      table_(table),
      size_(cache.shape().block_size),
      key_words_(size_t(cache.format() == CacheFormat::kInt8 ? cache.shape().head_dim : cache.key_rows()) * kLanes),
      value_words_(size_t(kLanes) * cache.value_columns()),
      scratch_(scratch) {
  scratch_.resize(2 * (key_words_ + value_words_));
}

Half TileReader::read(int begin, int count, int which) {
  if (cache_.format() == CacheFormat::kInt8) return decode(begin, count, which);
  if (!in_one_block()) return copy(begin, count, which);
  const int64_t block = table_[begin / size_];
  const int place = begin % size_;
  return {cache_.keys(layer_, block, head_) + place,
          cache_.values(layer_, block, head_) + place / cache_.values_per_word() * cache_.value_columns(), size_};
}

void TileReader::prefetch(int begin) const {
  if (!in_one_block()) return;
  const int64_t block = table_[begin / size_];
  const int place = begin % size_, words = kLanes / cache_.values_per_word() * cache_.value_columns();
  const int32_t* const keys = cache_.keys(layer_, block, head_) + place;
  const int32_t* const values = cache_.values(layer_, block, head_) + place / cache_.values_per_word() * cache_.value_columns();
  for (int row = 0; row < cache_.key_rows(); ++row) __builtin_prefetch(keys + ptrdiff_t(row) * size_, 0, 2);
  for (int word = 0; word < words; word += 16) __builtin_prefetch(values + word, 0, 2);
}

Half TileReader::copy(int begin, int count, int which) {
  const int columns = cache_.value_columns(), pair = cache_.values_per_word();
  int32_t* const keys = scratch_.data() + which * (key_words_ + value_words_);
  int32_t* const values = keys + key_words_;
  std::memset(keys, 0, (key_words_ + value_words_) * sizeof(int32_t));
  for (int index = 0; index < count; ++index) {
    const int64_t block = table_[(begin + index) / size_];
    const int place = (begin + index) % size_;
    const int32_t* const from = cache_.keys(layer_, block, head_) + place;
    for (int row = 0; row < cache_.key_rows(); ++row) keys[row * kLanes + index] = from[ptrdiff_t(row) * size_];
    const int32_t* const value = cache_.values(layer_, block, head_) + place / pair * columns;
    if (pair == 1) {
      std::memcpy(values + index * columns, value, sizeof(int32_t) * static_cast<size_t>(columns));
    } else {
      const uint16_t* const halves = reinterpret_cast<const uint16_t*>(value) + place % 2;
      uint16_t* const to = reinterpret_cast<uint16_t*>(values + index / 2 * columns) + index % 2;
      for (int column = 0; column < columns; ++column) to[2 * column] = halves[2 * column];
    }
  }
  return {keys, values, kLanes};
}

Half TileReader::decode(int begin, int count, int which) {
  int32_t* const words = scratch_.data() + which * (key_words_ + value_words_);
  float *const keys = reinterpret_cast<float*>(words), *const values = keys + key_words_;
  if (in_one_block()) {
    decode_block(begin, keys, values);
  } else {
    std::fill(keys, values + value_words_, 0.0f);
    for (int index = 0; index < count; ++index) decode_token(begin + index, index, keys, values);
  }
  return {words, words + key_words_, kLanes};
}

// kLanes tokens of one block: neighbouring tokens are neighbouring words of keys, and share the words of values.
void TileReader::decode_block(int begin, float* keys, float* values) const {
  const int64_t block = table_[begin / size_];
  const int place = begin % size_, columns = cache_.value_columns(), dim = cache_.shape().head_dim;
  const int32_t* const key_words = cache_.keys(layer_, block, head_) + place;
  const int32_t* const value_words = cache_.values(layer_, block, head_) + place / 4 * columns;
  const float* const scales = cache_.scales(layer_, block, head_) + place;
  const Floats key_scales = load(scales);
  for (int d = 0; d < dim; d += 4) {
    const Ints words = load(key_words + ptrdiff_t(d / 4) * size_);
    for (int byte = 0; byte < std::min(4, dim - d); ++byte) {
      store(keys + (d + byte) * kLanes, byte_of(words, byte) * key_scales);
    }
  }
  for (int token = 0; token < kLanes; token += 4) {
    for (int column = 0; column < columns; column += kLanes) {
      const Ints words = load(value_words + token / 4 * columns + column);
      for (int byte = 0; byte < 4; ++byte) {
        store(values + (token + byte) * columns + column, byte_of(words, byte) * splat(scales[size_ + token + byte]));
      }
    }
  }
}

void TileReader::decode_token(int token, int index, float* keys, float* values) const {
  const int64_t block = table_[token / size_];
  const int place = token % size_, columns = cache_.value_columns();
  const int32_t* const key_words = cache_.keys(layer_, block, head_) + place;
  const int32_t* const value_words = cache_.values(layer_, block, head_) + place / 4 * columns;
  const float* const scales = cache_.scales(layer_, block, head_) + place;
  for (int d = 0; d < cache_.shape().head_dim; ++d) {
    const int32_t key = reinterpret_cast<const int8_t*>(key_words + ptrdiff_t(d / 4) * size_)[d % 4];
    const int32_t value = reinterpret_cast<const int8_t*>(value_words + d)[place % 4];
    keys[d * kLanes + index] = static_cast<float>(key) * scales[0];
    values[index * columns + d] = static_cast<float>(value) * scales[size_];
  }
}

}  // namespace paceline
