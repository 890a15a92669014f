// A linear layer: weights packed once at load, multiplied with the rows of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"
#include "tile.h"

namespace paceline {

// Numbers in a tensor of the model: float32 or bfloat16, rows side by side.
struct Source {
  const void* data;
  int32_t bfloat16;

  // Copy `count` numbers, beginning with number `first`.
  void read(ptrdiff_t first, int count, float* to) const {
    if (bfloat16) {
      const uint16_t* const from = static_cast<const uint16_t*>(data) + first;
      for (int index = 0; index < count; ++index) to[index] = from_bfloat16(from[index]);
    } else {
      const float* const from = static_cast<const float*>(data) + first;
      for (int index = 0; index < count; ++index) to[index] = from[index];
    }
  }
};

// T rows in the form that a product wants.
struct Rows {
  const int32_t* data;
  ptrdiff_t stride;        // in words
  const RowScale* scales;  // [T], for kBytes
  int count;
};

// Where a product goes. Only the first `columns` of a row are written.
struct Output {
  enum class Kind {
    kStore,   // data = value
    kAdd,     // data += factor * value
    kSwiglu,  // data = silu(gate) * up; see Matrix::pack_gated
    kGeglu,   // data = gelu(gate) * up, by the formula with tanh
  };
  Kind kind;
  float* data;
  ptrdiff_t stride;
  float factor = 1.0f;
};

// Weights [outputs, inputs], transposed and cut into panels of kTileColumns outputs: within a panel the words (simd.h)
// of one k lie side by side, and k follows k, so that a product reads memory from front to back.
class Matrix {
 public:
  Matrix() = default;

  // weight: [outputs, inputs]; bias: [outputs] or null. Parts are appended: q, k and v become one matrix.
  struct Part {
    Source weight;
    Source bias;
    int outputs;
  };
  static Matrix pack(Pool& pool, Arena& arena, const std::vector<Part>& parts, int inputs, WeightFormat format);

  // Gate and up projection, in turns of kLanes outputs, so that a tile holds what belongs together.
  static Matrix pack_gated(Pool& pool, Arena& arena, const Part& gate, const Part& up, int inputs, WeightFormat format);

  // The form that `multiply` wants its rows in.
  Form form() const { return form_; }
  int inputs() const { return inputs_; }

  void multiply(Pool& pool, const Rows& rows, const Output& out) const;

 private:
  struct Column {
    Source weight;
    Source bias;
    ptrdiff_t index;  // row in `weight`; -1 for padding
  };

  static Matrix pack_columns(Pool& pool, Arena& arena, const std::vector<Column>& columns, int outputs, int inputs,
                             WeightFormat format);
  void pack_column(const Column& column, int position);
  void quantize(const std::vector<float>& row, int position, int8_t* out);
  ptrdiff_t panel_words() const { return ptrdiff_t(words_) * kTileColumns; }
  const int32_t* panel_data(int panel) const { return data_ + panel * panel_words(); }

  // The rows [begin, end) times one panel. next: the panel that is probably wanted after it, or null.
  struct Work {
    int panel, begin, end;
    const char* next;
  };
  // Call body(Format{}) with the format that this processor multiplies these weights in.
  template <class Body>
  void with_format(const Body& body) const;
  template <class Format>
  void multiply_panel(const Rows& rows, const Work& work, const Output& out) const;
  // kFewRows rows or fewer times kStreams panels, each `apart` behind the one before.
  template <class Format>
  void multiply_streams(const Rows& rows, int first, int apart, const Output& out) const;
  int rows_at_once() const;
  void fetch_results(int panel, int begin, int end, const Output& out) const;
  template <class Sum>
  void finish(const Sum* sums, const Rows& rows, int panel, int begin, int end, const Output& out) const;

  WeightFormat format_ = WeightFormat::kFloat32;
  Form form_ = Form::kFloat32;
  int inputs_ = 0;
  int outputs_ = 0;  // columns of the result; of a gated pair, half the columns of the product
  int panels_ = 0;
  int words_ = 0;  // of a column
  bool has_bias_ = false;
  int32_t* data_ = nullptr;         // [panels, words, kTileColumns], in the arena
  std::vector<float> bias_;         // [panels * kTileColumns]
  std::vector<float> scales_;       // the same, for int8: real weight = scale * stored
  std::vector<int32_t> sums_;       // the same, for int8: sum of a column's stored weights
};

}  // namespace paceline
