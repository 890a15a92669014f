// What happens to one token's row of numbers: norms, rotation, and the forms in which products take activations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

// How the activations of a product are written: see the formats in simd.h.
enum class Form : int32_t { kFloat32 = 0, kPairs = 1, kBytes = 2 };

// Words of four bytes that a row of `size` values takes. All forms are padded with zeros to whole words; float32 to an
// even number, because bfloat16 weights come in pairs.
inline ptrdiff_t row_words(Form form, int size) {
  switch (form) {
    case Form::kFloat32: return (size + 1) / 2 * 2;
    case Form::kPairs: return (size + 1) / 2;
    default: return (size + 3) / 4;
  }
}

// Real value of byte b in a row: scale * (b - zero).
struct RowScale {
  float scale;
  int32_t zero;
};

// Write a row in a form. `scale` is set for kBytes alone, where the row's own range is spread over 0 to Int8::kLargest.
void prepare_row(Form form, const float* row, int size, int32_t* out, RowScale* scale);

// out = row / rms(row) * weight; `out` may be `row`.
void rms_norm(const float* row, const float* weight, float epsilon, int size, float* out);

// Rotary position embedding of one head, in place: element i < rotary / 2 turns with element i + rotary / 2.
void rotate(float* head, const float* cosine, const float* sine, int rotary);

// Multiply the row, seen as [factor, size / factor], with Hadamard's matrix from the left, and with 1 / sqrt(factor), in
// place: large values are spread over `factor` places. factor: a power of two that divides size.
void hadamard(float* row, int factor, int size);

// row = cap * tanh(row / cap)
void cap_row(float* row, float cap, int size);

// row *= factor
void scale_row(float* row, float factor, int size);

}  // namespace paceline
