#include "rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace paceline {
namespace {

RowScale byte_scale(const float* row, int size) {
  float low = 0.0f, high = 0.0f;  // zero itself must have a byte: it is what padding means
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int i = 0; i < size; ++i) {
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
  }
  const float scale = high > low ? (high - low) / Int8::kLargest : 1.0f;
  return {scale, static_cast<int32_t>(std::lrintf(-low / scale))};
}

// Integers from the first bound on: bounds on floats become masks of bytes, and take four times as long.
void write_bytes(const float* row, int size, RowScale scale, uint8_t* out) {
  constexpr float kRound = 12582912.0f;  // see exp2_of
  const float inverse = 1.0f / scale.scale;
  const int32_t offset = scale.zero - std::bit_cast<int32_t>(kRound);
#pragma omp simd
  for (int i = 0; i < size; ++i) {
    const int32_t value = std::bit_cast<int32_t>(row[i] * inverse + kRound) + offset;
    out[i] = static_cast<uint8_t>(std::min(std::max(value, 0), Int8::kLargest));
  }
}

}  // namespace

void prepare_row(Form form, const float* row, int size, int32_t* out, RowScale* scale) {
  const ptrdiff_t words = row_words(form, size);
  if (words > 0) out[words - 1] = 0;  // the padding, where there is some
  switch (form) {
    case Form::kFloat32:
      std::memcpy(out, row, sizeof(float) * static_cast<size_t>(size));
      break;
    case Form::kPairs: {
      uint16_t* halves = reinterpret_cast<uint16_t*>(out);
#pragma omp simd
      for (int i = 0; i < size; ++i) halves[i] = to_bfloat16(row[i]);
      break;
    }
    case Form::kBytes:
      *scale = byte_scale(row, size);
      write_bytes(row, size, *scale, reinterpret_cast<uint8_t*>(out));
      break;
  }
}

void rms_norm(const float* row, const float* weight, float epsilon, int size, float* out) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < size; ++i) squares += row[i] * row[i];
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
#pragma omp simd
  for (int i = 0; i < size; ++i) out[i] = row[i] * inverse * weight[i];
}

void rotate(float* head, const float* cosine, const float* sine, int rotary) {
  const int half = rotary / 2;
#pragma omp simd
  for (int i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cosine[i] - second * sine[i];
    head[i + half] = second * cosine[i + half] + first * sine[i + half];
  }
}

void hadamard(float* row, int factor, int size) {
  for (int span = size / factor; span < size; span *= 2) {
    for (int begin = 0; begin < size; begin += 2 * span) {
      float *const low = row + begin, *const high = low + span;
#pragma omp simd
      for (int i = 0; i < span; ++i) {
        const float first = low[i], second = high[i];
        low[i] = first + second;
        high[i] = first - second;
      }
    }
  }
  scale_row(row, 1.0f / std::sqrt(static_cast<float>(factor)), size);
}

void cap_row(float* row, float cap, int size) {
  const float inverse = 1.0f / cap;
#pragma omp simd
  for (int i = 0; i < size; ++i) row[i] = cap * tanh_of(row[i] * inverse);
}

void scale_row(float* row, float factor, int size) {
#pragma omp simd
  for (int i = 0; i < size; ++i) row[i] *= factor;
}

}  // namespace paceline
