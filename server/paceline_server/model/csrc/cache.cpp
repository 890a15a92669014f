#include "cache.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

int values_per_word(CacheFormat format) {
  return format == CacheFormat::kFloat32 ? 1 : format == CacheFormat::kBfloat16 ? 2 : 4;
}

// The real value of one step, for a row whose largest step is 127.
float int8_scale(const float* row, int size) {
  float largest = 0.0f;
#pragma omp simd reduction(max : largest)
  for (int d = 0; d < size; ++d) largest = std::max(largest, std::fabs(row[d]));
  return largest / 127.0f;
}

int8_t to_int8(float value, float inverse) {
  constexpr float kRound = 12582912.0f;  // see exp2_of
  return static_cast<int8_t>((value * inverse + kRound) - kRound);
}

}  // namespace

Cache::Cache(Pool& pool, const CacheShape& shape)
    : shape_(shape),
      values_per_word_(paceline::values_per_word(shape.format)),
      value_columns_((shape.head_dim + kTileColumns - 1) / kTileColumns * kTileColumns),
      key_words_(ptrdiff_t(key_rows()) * shape.block_size),
      value_words_(ptrdiff_t(value_rows()) * value_columns_),
      head_words_(key_words_ + value_words_ + (shape.format == CacheFormat::kInt8 ? 2 * shape.block_size : 0)) {
  // Zeros, because what was never written must be finite: a masked score's probability of 0 is multiplied with it.
  data_ = map_zeros<int32_t>(pool, size_t(shape.layers) * shape.blocks * shape.kv_heads * head_words_);
}

void Cache::write(int layer, int64_t slot, int head, const float* key, const float* value) const {
  const int size = shape_.block_size, dim = shape_.head_dim;
  const int64_t block = slot / size, place = slot % size;
  int32_t* const key_words = keys(layer, block, head) + place;
  int32_t* const value_words = values(layer, block, head) + place / values_per_word_ * value_columns_;
  switch (shape_.format) {
    case CacheFormat::kFloat32:
      for (int d = 0; d < dim; ++d) key_words[ptrdiff_t(d) * size] = std::bit_cast<int32_t>(key[d]);
      std::memcpy(value_words, value, sizeof(float) * static_cast<size_t>(dim));
      return;
    case CacheFormat::kBfloat16: {
      for (int d = 0; d < dim; d += 2) {
        const uint32_t high = d + 1 < dim ? to_bfloat16(key[d + 1]) : 0;
        key_words[ptrdiff_t(d / 2) * size] = static_cast<int32_t>(high << 16 | to_bfloat16(key[d]));
      }
      uint16_t* const halves = reinterpret_cast<uint16_t*>(value_words) + place % 2;
      for (int d = 0; d < dim; ++d) halves[ptrdiff_t(2) * d] = to_bfloat16(value[d]);
      return;
    }
    case CacheFormat::kInt8: {
      float* const scale = scales(layer, block, head) + place;
      scale[0] = int8_scale(key, dim);
      scale[size] = int8_scale(value, dim);
      const float key_inverse = scale[0] > 0.0f ? 1.0f / scale[0] : 0.0f;
      const float value_inverse = scale[size] > 0.0f ? 1.0f / scale[size] : 0.0f;
      for (int d = 0; d < dim; ++d) {
        reinterpret_cast<int8_t*>(key_words + ptrdiff_t(d / 4) * size)[d % 4] = to_int8(key[d], key_inverse);
        reinterpret_cast<int8_t*>(value_words + d)[place % 4] = to_int8(value[d], value_inverse);
      }
      return;
    }
  }
}

}  // namespace paceline
