#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace paceline {
namespace {

constexpr int kRowsAtOnce = 12 * kTileRows;           // of activations, which stay in the cache from panel to panel
constexpr size_t kTaskBytes = size_t{48} << 10;  // of weights: claiming a task must cost nothing beside it

int words_of(WeightFormat format, int inputs) {
  const int values = format == WeightFormat::kFloat32 ? 1 : format == WeightFormat::kBfloat16 ? 2 : 4;
  return (inputs + values - 1) / values;
}

Form form_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32: return Form::kFloat32;
    case WeightFormat::kBfloat16: return bfloat16_paired_is_faster() ? Form::kPairs : Form::kFloat32;
    default: return Form::kBytes;
  }
}

float silu(float x) { return x / (1.0f + exp2_of(-1.44269504f * x)); }

float gelu(float x) { return 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x))); }

// Call body(begin, end) for `count` things in `pieces` pieces of nearly the same size.
template <class Body>
void split_evenly(int count, int pieces, const Body& body) {
  for (int piece = 0; piece < pieces; ++piece) {
    body(static_cast<int>(int64_t{count} * piece / pieces), static_cast<int>(int64_t{count} * (piece + 1) / pieces));
  }
}

}  // namespace

Matrix Matrix::pack(Pool& pool, const std::vector<Part>& parts, int inputs, WeightFormat format) {
  std::vector<Column> columns;
  for (const Part& part : parts) {
    for (int output = 0; output < part.outputs; ++output) columns.push_back({part.weight, part.bias, output});
  }
  const int outputs = static_cast<int>(columns.size());
  return pack_columns(pool, columns, outputs, inputs, format);
}

Matrix Matrix::pack_gated(Pool& pool, const Part& gate, const Part& up, int inputs, WeightFormat format) {
  std::vector<Column> columns;
  for (int begin = 0; begin < gate.outputs; begin += kLanes) {
    for (const Part* part : {&gate, &up}) {
      for (int output = begin; output < begin + kLanes; ++output) {
        columns.push_back({part->weight, part->bias, output < part->outputs ? output : -1});
      }
    }
  }
  return pack_columns(pool, columns, gate.outputs, inputs, format);
}

Matrix Matrix::pack_columns(Pool& pool, const std::vector<Column>& columns, int outputs, int inputs,
                            WeightFormat format) {
  Matrix matrix;
  matrix.format_ = format;
  matrix.form_ = form_of(format);
  matrix.inputs_ = inputs;
  matrix.outputs_ = outputs;
  matrix.words_ = words_of(format, inputs);
  matrix.panels_ = (static_cast<int>(columns.size()) + kTileColumns - 1) / kTileColumns;
  const size_t width = static_cast<size_t>(matrix.panels_) * kTileColumns;
  matrix.data_ = allocate<int32_t>(width * static_cast<size_t>(matrix.words_));
  matrix.bias_.assign(width, 0.0f);
  matrix.scales_.assign(width, 0.0f);
  matrix.sums_.assign(width, 0);
  for (const Column& column : columns) matrix.has_bias_ |= column.bias.data != nullptr;
  pool.run(matrix.panels_, [&](int panel) {
    std::memset(matrix.data_.get() + size_t(panel) * matrix.words_ * kTileColumns, 0,
                size_t(matrix.words_) * kTileColumns * sizeof(int32_t));
    for (int position = panel * kTileColumns; position < (panel + 1) * kTileColumns; ++position) {
      if (position < static_cast<int>(columns.size()) && columns[position].index >= 0) {
        matrix.pack_column(columns[position], position);
      }
    }
  });
  return matrix;
}

void Matrix::pack_column(const Column& column, int position) {
  static thread_local std::vector<float> row;
  static thread_local std::vector<int32_t> words;
  row.resize(static_cast<size_t>(inputs_));
  words.assign(static_cast<size_t>(words_), 0);
  column.weight.read(column.index * inputs_, inputs_, row.data());
  switch (format_) {
    case WeightFormat::kFloat32: std::memcpy(words.data(), row.data(), sizeof(float) * row.size()); break;
    case WeightFormat::kBfloat16: prepare_row(Form::kPairs, row.data(), inputs_, words.data(), nullptr); break;
    case WeightFormat::kInt8: quantize(row, position, reinterpret_cast<int8_t*>(words.data())); break;
  }
  int32_t* const to =
      data_.get() + ptrdiff_t(position / kTileColumns) * words_ * kTileColumns + position % kTileColumns;
  for (int word = 0; word < words_; ++word) to[ptrdiff_t(word) * kTileColumns] = words[static_cast<size_t>(word)];
  if (column.bias.data != nullptr) column.bias.read(column.index, 1, &bias_[static_cast<size_t>(position)]);
}

void Matrix::quantize(const std::vector<float>& row, int position, int8_t* out) {
  float largest = 0.0f;
  for (const float value : row) largest = std::max(largest, std::fabs(value));
  const float scale = largest > 0.0f ? largest / 127.0f : 1.0f, inverse = 1.0f / scale;
  int32_t sum = 0;
  for (size_t k = 0; k < row.size(); ++k) {
    const float value = std::clamp(row[k] * inverse, -127.0f, 127.0f);
    out[k] = static_cast<int8_t>(value + (value < 0.0f ? -0.5f : 0.5f));
    sum += out[k];
  }
  scales_[static_cast<size_t>(position)] = scale;
  sums_[static_cast<size_t>(position)] = sum;
}

void Matrix::multiply(Pool& pool, const Rows& rows, const Output& out) const {
  const int row_blocks = (rows.count + kRowsAtOnce - 1) / kRowsAtOnce;
  const size_t panel_bytes = size_t(words_) * kTileColumns * sizeof(int32_t);
  const int per_task = row_blocks > 1 ? 1 : std::max<int>(1, kTaskBytes / panel_bytes);
  const int panel_tasks = (panels_ + per_task - 1) / per_task;
  pool.run(row_blocks * panel_tasks, [&](int task) {
    const int block = task / panel_tasks, first = task % panel_tasks * per_task;
    const int begin = static_cast<int>(int64_t{rows.count} * block / row_blocks);
    const int end = static_cast<int>(int64_t{rows.count} * (block + 1) / row_blocks);
    for (int panel = first; panel < std::min(first + per_task, panels_); ++panel) {
      switch (format_) {
        case WeightFormat::kFloat32: multiply_rows<Float32>(rows, panel_data(panel), words_, panel, begin, end, out); break;
        case WeightFormat::kInt8: multiply_rows<Int8>(rows, panel_data(panel), words_, panel, begin, end, out); break;
        case WeightFormat::kBfloat16:
#if defined(__AVX512BF16__)
          if (form_ == Form::kPairs) {
            multiply_rows<Bfloat16Paired>(rows, panel_data(panel), words_, panel, begin, end, out);
            break;
          }
#endif
          multiply_widened(rows, panel, begin, end, out);
          break;
      }
    }
  });
}

// bfloat16 weights with float32 arithmetic. For more than one tile of rows the panel is widened once, not in each tile.
void Matrix::multiply_widened(const Rows& rows, int panel, int begin, int end, const Output& out) const {
  const int32_t* const weights = panel_data(panel);
  if (end - begin <= kTileRows) return multiply_rows<Bfloat16Widened>(rows, weights, words_, panel, begin, end, out);
  static thread_local std::vector<int32_t> wide;
  wide.resize(size_t(2) * words_ * kTileColumns);
  for (int word = 0; word < words_; ++word) {
    for (int half = 0; half < kTileColumns; half += kLanes) {
      const Ints pairs = load(weights + ptrdiff_t(word) * kTileColumns + half);
      store(wide.data() + ptrdiff_t(2) * word * kTileColumns + half, pairs << 16);
      store(wide.data() + (ptrdiff_t(2) * word + 1) * kTileColumns + half, pairs & splat(int32_t(0xffff0000)));
    }
  }
  multiply_rows<Float32>(rows, wide.data(), 2 * words_, panel, begin, end, out);
}

template <class Format>
void Matrix::multiply_rows(const Rows& rows, const int32_t* weights, int words, int panel, int begin, int end,
                           const Output& out) const {
  using Scalar = std::remove_cvref_t<decltype(typename Format::Sum{}[0])>;
  alignas(64) Scalar sums[kTileRows * kTileColumns];
  // 16 rows are 8 and 8, not 12 and 4: a short tile has the same loads for less work.
  split_evenly(end - begin, (end - begin + kTileRows - 1) / kTileRows, [&](int low, int high) {
    const int row = begin + low;
    tile_function<Format>(high - low)({rows.data + row * rows.stride,
                                       rows.stride,
                                       {{weights, weights + kLanes, words}, {}},
                                       kTileColumns,
                                       sums,
                                       kTileColumns,
                                       false});
    for (int index = 0; index < high - low; ++index) finish(sums + index * kTileColumns, rows, panel, row + index, out);
  });
}

template <class Sum>
void Matrix::finish(const Sum* sums, const Rows& rows, int panel, int row, const Output& out) const {
  alignas(64) float values[kTileColumns];
  const ptrdiff_t first = ptrdiff_t(panel) * kTileColumns;
  if constexpr (std::is_same_v<Sum, float>) {
    std::memcpy(values, sums, sizeof values);
  } else {
    const RowScale scale = rows.scales[row];
    const int32_t* const column_sums = sums_.data() + first;
    const float* const scales = scales_.data() + first;
#pragma omp simd
    for (int c = 0; c < kTileColumns; ++c) {
      values[c] = static_cast<float>(sums[c] - scale.zero * column_sums[c]) * (scale.scale * scales[c]);
    }
  }
  if (has_bias_) {
    const float* const bias = bias_.data() + first;
#pragma omp simd
    for (int c = 0; c < kTileColumns; ++c) values[c] += bias[c];
  }
  float* const to = out.data + row * out.stride;
  if (out.kind == Output::Kind::kSwiglu || out.kind == Output::Kind::kGeglu) {
    const int begin = panel * kLanes, count = std::min(kLanes, outputs_ - begin);
    if (out.kind == Output::Kind::kSwiglu) {
#pragma omp simd
      for (int c = 0; c < count; ++c) to[begin + c] = silu(values[c]) * values[c + kLanes];
    } else {
#pragma omp simd
      for (int c = 0; c < count; ++c) to[begin + c] = gelu(values[c]) * values[c + kLanes];
    }
    return;
  }
  const int begin = panel * kTileColumns, count = std::min(kTileColumns, outputs_ - begin);
  if (out.kind == Output::Kind::kAdd) {
#pragma omp simd
    for (int c = 0; c < count; ++c) to[begin + c] += out.factor * values[c];
  } else {
    std::memcpy(to + begin, values, sizeof(float) * static_cast<size_t>(count));
  }
}

}  // namespace paceline
