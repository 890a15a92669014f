#include "tile_reader.h"

#include <algorithm>
#include <cstring>

namespace paceline {
namespace {

// Byte `number` of each word, with its sign, as float32.
Floats byte_of(Ints words, int number) {
  return __builtin_convertvector((words << (24 - 8 * number)) >> 24, Floats);
}

// The two bfloat16 numbers of each word.
void widen(Ints pairs, float* first, float* second) {
  store(first, (Floats)(pairs << 16));
  store(second, (Floats)(pairs & splat(int32_t(0xffff0000))));
}

}  // namespace

TileReader::TileReader(const Cache& cache, const KeyRange& range, const std::optional<KeyRange>& next, bool as_float32,
                       std::vector<int32_t>& scratch)
    : cache_(cache),
      range_(range),
      next_(next),
      converts_(cache.format() == CacheFormat::kInt8 || (as_float32 && cache.format() == CacheFormat::kBfloat16)),
      size_(cache.shape().block_size),
      // Converted keys have a row for each number of a cached word, of which a last one may be padding.
      key_words_(size_t(converts_ ? cache.key_rows() * cache.values_per_word() : cache.key_rows()) * kLanes),
      value_words_(size_t(kLanes) * cache.value_columns()),
      scratch_(scratch) {
  scratch_.resize(kGroupHalves * (key_words_ + value_words_));
}

Group TileReader::read(int begin) {
  Group group{};
  const int halves = (std::min(kGroupKeys, range_.end - begin) + kLanes - 1) / kLanes;
  for (int which = 0; which < halves; ++which) group.halves[which] = read_half(begin + which * kLanes, which);
  if (halves % 2 == 1) group.halves[halves] = group.halves[halves - 1];
  return group;
}

Half TileReader::read_half(int begin, int which) {
  int32_t* const to = scratch_.data() + size_t(which) * (key_words_ + value_words_);
  const int count = std::min(kLanes, range_.end - begin);
  const std::optional<Half> next = in_one_block() ? next_half(begin) : std::nullopt;
  if (converts_) {
    if (next) prefetch(*next);
    return convert(begin, count, to);
  }
  if (!in_one_block()) return copy(begin, count, to);
  Half half = locate(range_, begin);
  if (next) {
    half.next_keys = next->keys;
    half.next_values = next->values;
  }
  return half;
}

Half TileReader::locate(const KeyRange& range, int token) const {
  const int64_t block = range.table[token / size_];
  const int place = token % size_;
  return {cache_.keys(range.layer, block, range.head) + place,
          cache_.values(range.layer, block, range.head) + place / cache_.values_per_word() * cache_.value_columns(),
          size_};
}

// The half that is as far into the next group, or into the next range behind the last group.
std::optional<Half> TileReader::next_half(int begin) const {
  if (begin + kGroupKeys < range_.end) return locate(range_, begin + kGroupKeys);
  const int later = next_ ? next_->begin + begin % kGroupKeys : 0;
  return next_ && later < next_->end ? std::optional(locate(*next_, later)) : std::nullopt;
}

void TileReader::prefetch(const Half& half) const {
  const int words = kLanes / cache_.values_per_word() * cache_.value_columns();
  for (int row = 0; row < cache_.key_rows(); ++row) __builtin_prefetch(half.keys + ptrdiff_t(row) * size_, 0, 2);
  for (int word = 0; word < words; word += 16) __builtin_prefetch(half.values + word, 0, 2);
}

Half TileReader::copy(int begin, int count, int32_t* keys) const {
  const int columns = cache_.value_columns(), pair = cache_.values_per_word();
  int32_t* const values = keys + key_words_;
  std::memset(keys, 0, (key_words_ + value_words_) * sizeof(int32_t));
  for (int index = 0; index < count; ++index) {
    const int64_t block = range_.table[(begin + index) / size_];
    const int place = (begin + index) % size_;
    const int32_t* const from = cache_.keys(range_.layer, block, range_.head) + place;
    for (int row = 0; row < cache_.key_rows(); ++row) keys[row * kLanes + index] = from[ptrdiff_t(row) * size_];
    const int32_t* const value = cache_.values(range_.layer, block, range_.head) + place / pair * columns;
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

Half TileReader::convert(int begin, int count, int32_t* words) const {
  float *const keys = reinterpret_cast<float*>(words), *const values = keys + key_words_;
  const bool int8 = cache_.format() == CacheFormat::kInt8;
  if (in_one_block()) {
    int8 ? decode_block(begin, keys, values) : widen_block(begin, keys, values);
  } else {
    std::fill(keys, values + value_words_, 0.0f);
    for (int index = 0; index < count; ++index) {
      int8 ? decode_token(begin + index, index, keys, values) : widen_token(begin + index, index, keys, values);
    }
  }
  return {words, words + key_words_, kLanes};
}

// kLanes tokens of one block: neighbouring tokens are neighbouring words of keys, and share the words of values.
void TileReader::decode_block(int begin, float* keys, float* values) const {
  const Half half = locate(range_, begin);
  const int columns = cache_.value_columns(), dim = cache_.shape().head_dim;
  const float* const scales = cache_.scales(range_.layer, range_.table[begin / size_], range_.head) + begin % size_;
  const Floats key_scales = load(scales);
  for (int d = 0; d < dim; d += 4) {
    const Ints words = load(half.keys + ptrdiff_t(d / 4) * size_);
    for (int byte = 0; byte < std::min(4, dim - d); ++byte) {
      store(keys + (d + byte) * kLanes, byte_of(words, byte) * key_scales);
    }
  }
  for (int token = 0; token < kLanes; token += 4) {
    for (int column = 0; column < columns; column += kLanes) {
      const Ints words = load(half.values + token / 4 * columns + column);
      for (int byte = 0; byte < 4; ++byte) {
        store(values + (token + byte) * columns + column, byte_of(words, byte) * splat(scales[size_ + token + byte]));
      }
    }
  }
}

void TileReader::decode_token(int token, int index, float* keys, float* values) const {
  const Half half = locate(range_, token);
  const int place = token % size_, columns = cache_.value_columns();
  const float* const scales = cache_.scales(range_.layer, range_.table[token / size_], range_.head) + place;
  for (int d = 0; d < cache_.shape().head_dim; ++d) {
    const int32_t key = reinterpret_cast<const int8_t*>(half.keys + ptrdiff_t(d / 4) * size_)[d % 4];
    const int32_t value = reinterpret_cast<const int8_t*>(half.values + d)[place % 4];
    keys[d * kLanes + index] = static_cast<float>(key) * scales[0];
    values[index * columns + d] = static_cast<float>(value) * scales[size_];
  }
}

// As decode_block and decode_token, of bfloat16.
void TileReader::widen_block(int begin, float* keys, float* values) const {
  const Half half = locate(range_, begin);
  const int columns = cache_.value_columns();
  for (int row = 0; row < cache_.key_rows(); ++row) {
    widen(load(half.keys + ptrdiff_t(row) * size_), keys + 2 * row * kLanes, keys + (2 * row + 1) * kLanes);
  }
  for (int token = 0; token < kLanes; token += 2) {
    for (int column = 0; column < columns; column += kLanes) {
      float* const to = values + token * columns + column;
      widen(load(half.values + token / 2 * columns + column), to, to + columns);
    }
  }
}

void TileReader::widen_token(int token, int index, float* keys, float* values) const {
  const Half half = locate(range_, token);
  const uint16_t* const pairs = reinterpret_cast<const uint16_t*>(half.values) + token % size_ % 2;
  for (int d = 0; d < cache_.shape().head_dim; ++d) {
    const uint16_t* const key = reinterpret_cast<const uint16_t*>(half.keys + ptrdiff_t(d / 2) * size_);
    keys[d * kLanes + index] = from_bfloat16(key[d % 2]);
    values[index * cache_.value_columns() + d] = from_bfloat16(pairs[2 * d]);
  }
}

}  // namespace paceline
