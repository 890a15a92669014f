#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace paceline {
namespace {

constexpr int kLeastRowsAtOnce = 12 * kTileRows;
constexpr int kMostRowsAtOnce = 256;
constexpr size_t kRowsBytes = size_t{256} << 10;  // of activations, which stay in the cache from panel to panel
constexpr int kBlockWords = 320;  // of k: so much of a panel stays in the first-level cache from tile to tile
constexpr int kTaskRows = 32;  // a task of so many rows is worth two
constexpr float kRounding = 2.0f;  // what rounding adds to a sum of four weights at most
constexpr size_t kTaskBytes = size_t{48} << 10;  // of weights: claiming a task must cost nothing beside it
constexpr size_t kFewTaskBytes = size_t{256} << 10;  // the same for few rows: long streams, from memory

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

Floats silu(Floats x) { return x / (1.0f + exp2_of(-1.44269504f * x)); }

Floats gelu(Floats x) { return 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x))); }

bool is_gated(Output::Kind kind) { return kind == Output::Kind::kSwiglu || kind == Output::Kind::kGeglu; }

// Write the first `count` lanes, which may be more than there are, or fewer than one.
void store_some(float* to, Floats values, int count) {
  if (count >= kLanes) return store(to, values);
  for (int lane = 0; lane < count; ++lane) to[lane] = values[lane];
}

Floats load_some(const float* from, int count) {
  if (count >= kLanes) return load(from);
  Floats values{};
  for (int lane = 0; lane < count; ++lane) values[lane] = from[lane];
  return values;
}

// The largest sum of weights of one sign among those whose products Int8 adds in 16 bits: a half of each of two words.
float largest_sum(const std::vector<float>& row) {
  float largest = 0.0f;
  for (size_t first = 0; first < row.size(); first += first % 8 == 0 ? 2 : 6) {
    float above = 0.0f, below = 0.0f;
    for (const size_t k : {first, first + 1, first + 4, first + 5}) {
      const float value = k < row.size() ? row[k] : 0.0f;
      above += std::max(value, 0.0f);
      below += std::max(-value, 0.0f);
    }
    largest = std::max({largest, above, below});
  }
  return largest;
}

// Call body(begin, end) for `count` things in `pieces` pieces of nearly the same size.
template <class Body>
void split_evenly(int count, int pieces, const Body& body) {
  for (int piece = 0; piece < pieces; ++piece) {
    body(static_cast<int>(int64_t{count} * piece / pieces), static_cast<int>(int64_t{count} * (piece + 1) / pieces));
  }
}

}  // namespace

Matrix Matrix::pack(Pool& pool, Arena& arena, const std::vector<Part>& parts, int inputs, WeightFormat format) {
  std::vector<Column> columns;
  for (const Part& part : parts) {
    for (int output = 0; output < part.outputs; ++output) columns.push_back({part.weight, part.bias, output});
  }
  const int outputs = static_cast<int>(columns.size());
  return pack_columns(pool, arena, columns, outputs, inputs, format);
}

Matrix Matrix::pack_gated(Pool& pool, Arena& arena, const Part& gate, const Part& up, int inputs,
                          WeightFormat format) {
  std::vector<Column> columns;
  for (int begin = 0; begin < gate.outputs; begin += kLanes) {
    for (const Part* part : {&gate, &up}) {
      for (int output = begin; output < begin + kLanes; ++output) {
        columns.push_back({part->weight, part->bias, output < part->outputs ? output : -1});
      }
    }
  }
  return pack_columns(pool, arena, columns, gate.outputs, inputs, format);
}

Matrix Matrix::pack_columns(Pool& pool, Arena& arena, const std::vector<Column>& columns, int outputs, int inputs,
                            WeightFormat format) {
  Matrix matrix;
  matrix.format_ = format;
  matrix.form_ = form_of(format);
  matrix.inputs_ = inputs;
  matrix.outputs_ = outputs;
  matrix.words_ = words_of(format, inputs);
  matrix.panels_ = (static_cast<int>(columns.size()) + kTileColumns - 1) / kTileColumns;
  const size_t width = static_cast<size_t>(matrix.panels_) * kTileColumns;
  matrix.data_ = arena.take<int32_t>(width * static_cast<size_t>(matrix.words_));
  matrix.bias_.assign(width, 0.0f);
  matrix.scales_.assign(width, 0.0f);
  matrix.sums_.assign(width, 0);
  for (const Column& column : columns) matrix.has_bias_ |= column.bias.data != nullptr;
  pool.run(matrix.panels_, [&](int panel) {
    std::memset(matrix.data_ + size_t(panel) * matrix.words_ * kTileColumns, 0,
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
      data_ + ptrdiff_t(position / kTileColumns) * words_ * kTileColumns + position % kTileColumns;
  for (int word = 0; word < words_; ++word) to[ptrdiff_t(word) * kTileColumns] = words[static_cast<size_t>(word)];
  if (column.bias.data != nullptr) column.bias.read(column.index, 1, &bias_[static_cast<size_t>(position)]);
}

void Matrix::quantize(const std::vector<float>& row, int position, int8_t* out) {
  float least = 0.0f;  // scale that keeps all in bounds
  for (const float value : row) least = std::max(least, std::fabs(value) / 127.0f);
  if constexpr (Int8::kWordsAtOnce == 2) least = std::max(least, largest_sum(row) / (Int8::kLargestSum - kRounding));
  const float scale = least > 0.0f ? least : 1.0f, inverse = 1.0f / scale;
  int32_t sum = 0;
  for (size_t k = 0; k < row.size(); ++k) {
    const float value = std::clamp(row[k] * inverse, -127.0f, 127.0f);
    out[k] = static_cast<int8_t>(value + (value < 0.0f ? -0.5f : 0.5f));
    sum += out[k];
  }
  scales_[static_cast<size_t>(position)] = scale;
  sums_[static_cast<size_t>(position)] = sum;
}

int Matrix::rows_at_once() const {
  const size_t fitting = kRowsBytes / (sizeof(int32_t) * static_cast<size_t>(row_words(form_, inputs_)));
  return std::clamp(static_cast<int>(std::min<size_t>(fitting, kMostRowsAtOnce)), kLeastRowsAtOnce, kMostRowsAtOnce);
}

void Matrix::multiply(Pool& pool, const Rows& rows, const Output& out) const {
  const int row_blocks = (rows.count + rows_at_once() - 1) / rows_at_once();
  // Panels whose results share a line of the cache go to one thread.
  const int together = is_gated(out.kind) ? 16 / kLanes : 1, groups = (panels_ + together - 1) / together;
  const size_t bytes = size_t(panels_) * static_cast<size_t>(panel_words()) * sizeof(int32_t);
  // As many tasks for each thread, and smaller ones where many rows make each longer.
  const size_t turns = static_cast<size_t>(rows.count / kTaskRows + 1);
  const size_t task_bytes = rows.count <= kFewRows ? kFewTaskBytes : kTaskBytes;
  const int threads = pool.threads(), wanted = static_cast<int>(bytes * turns / task_bytes) / threads * threads;
  const int tasks = std::min(groups, row_blocks > 1 ? groups : std::max(threads, wanted));
  const auto first_panel = [&](int task) { return static_cast<int>(int64_t{groups} * task / tasks) * together; };
  pool.run(row_blocks * tasks, [&](int index) {
    const int block = index / tasks, task = index % tasks;
    const int begin = first_panel(task), end = std::min(first_panel(task + 1), panels_);
    const int length = rows.count <= kFewRows ? (end - begin) / kStreams : 0;  // panels of a stream
    Work work{};
    work.begin = static_cast<int>(int64_t{rows.count} * block / row_blocks);
    work.end = static_cast<int>(int64_t{rows.count} * (block + 1) / row_blocks);
    with_format([&](auto format) {
      using Format = decltype(format);
      for (int panel = begin; panel < begin + length; ++panel) multiply_streams<Format>(rows, panel, length, out);
      for (work.panel = begin + length * kStreams; work.panel < end; ++work.panel) {
        // The other threads take the tasks between.
        const int next = work.panel + 1 < end ? work.panel + 1 : first_panel(task + threads);
        work.next = next < panels_ ? reinterpret_cast<const char*>(panel_data(next)) : nullptr;
        multiply_panel<Format>(rows, work, out);
      }
    });
  });
}

template <class Body>
void Matrix::with_format(const Body& body) const {
  switch (format_) {
    case WeightFormat::kFloat32: return body(Float32{});
    case WeightFormat::kInt8: return body(Int8{});
    case WeightFormat::kBfloat16:
#if defined(__AVX512BF16__)
      if (form_ == Form::kPairs) return body(Bfloat16Paired{});
#endif
      return body(Bfloat16Widened{});
  }
}

template <class Format>
void Matrix::multiply_streams(const Rows& rows, int first, int apart, const Output& out) const {
  using Scalar = std::remove_cvref_t<decltype(typename Format::Sum{}[0])>;
  Scalar sums[kStreams * kFewRows * kTileColumns];
  Streams streams{rows.data, rows.stride, {}, words_, sums};
  for (int stream = 0; stream < kStreams; ++stream) streams.panels[stream] = panel_data(first + stream * apart);
  streams_function<Format>(rows.count)(streams);
  for (int stream = 0; stream < kStreams; ++stream) {
    finish(sums + ptrdiff_t(stream) * rows.count * kTileColumns, rows, first + stream * apart, 0, rows.count, out);
  }
}

template <class Format>
void Matrix::multiply_panel(const Rows& rows, const Work& work, const Output& out) const {
  using Scalar = std::remove_cvref_t<decltype(typename Format::Sum{}[0])>;
  static thread_local std::vector<Scalar> sums;
  const int count = work.end - work.begin, tiles = (count + Format::kRows - 1) / Format::kRows;
  sums.resize(static_cast<size_t>(count) * kTileColumns);
  const char* ahead = tiles > 1 ? work.next : nullptr;  // one tile waits for memory itself
  const ptrdiff_t next_bytes = ahead == nullptr ? 0 : panel_words() * ptrdiff_t{sizeof(int32_t)};
  const ptrdiff_t ahead_step = next_bytes / (ptrdiff_t(words_) * tiles);
  const int blocks = (words_ + kBlockWords - 1) / kBlockWords, most = ((words_ + blocks - 1) / blocks + 1) / 2 * 2;
  for (int word = 0; word < words_; word += most) {
    const int these = std::min(most, words_ - word);
    const int32_t* const first = panel_data(work.panel) + ptrdiff_t(word) * kTileColumns;
    // 16 rows are 8 and 8, not 12 and 4: a short tile has the same loads for less work.
    split_evenly(count, tiles, [&](int low, int high) {
      const int row = work.begin + low;
      Scalar* const tile_sums = sums.data() + ptrdiff_t(low) * kTileColumns;
      const Run run{first, first + kLanes, these, ahead, ahead_step};
      if (word + these == words_) fetch_results(work.panel, row, work.begin + high, out);
      tile_function<Format>(high - low)({rows.data + row * rows.stride + ptrdiff_t(word) * Format::kActivations,
                                         rows.stride,
                                         &run,
                                         1,
                                         0,
                                         kTileColumns,
                                         tile_sums,
                                         kTileColumns,
                                         word > 0});
      if (ahead != nullptr) ahead += these * ahead_step;
      if (word + these < words_) return;
      finish(tile_sums, rows, work.panel, row, work.begin + high, out);
    });
  }
}

// Results lie a row of the output apart: fetched while the sums are made, they do not keep `finish` waiting.
void Matrix::fetch_results(int panel, int begin, int end, const Output& out) const {
  const int column = panel * (is_gated(out.kind) ? kLanes : kTileColumns);
  for (int row = begin; row < end; ++row) __builtin_prefetch(out.data + row * out.stride + column, 1);
}

// Sums of the rows [begin, end), [end - begin, kTileColumns], become results.
template <class Sum>
void Matrix::finish(const Sum* sums, const Rows& rows, int panel, int begin, int end, const Output& out) const {
  const ptrdiff_t first = ptrdiff_t(panel) * kTileColumns;
  const Floats scales[2] = {load(scales_.data() + first), load(scales_.data() + first + kLanes)};
  const Floats biases[2] = {load(bias_.data() + first), load(bias_.data() + first + kLanes)};
  const Ints column_sums[2] = {load(sums_.data() + first), load(sums_.data() + first + kLanes)};
  const bool gated = is_gated(out.kind);
  const int column = gated ? panel * kLanes : panel * kTileColumns;
  const int wanted = outputs_ - column;  // more than the panel has, or fewer
  for (int row = begin; row < end; ++row, sums += kTileColumns) {
    Floats halves[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if constexpr (std::is_same_v<Sum, float>) {
        halves[half] = load(sums + half * kLanes);
      } else {
        const RowScale scale = rows.scales[row];
        const Ints exact = load(sums + half * kLanes) - scale.zero * column_sums[half];
        halves[half] = __builtin_convertvector(exact, Floats) * (scale.scale * scales[half]);
      }
      if (has_bias_) halves[half] += biases[half];
    }
    float* const to = out.data + row * out.stride + column;
    if (gated) {
      const Floats gate = out.kind == Output::Kind::kSwiglu ? silu(halves[0]) : gelu(halves[0]);
      store_some(to, gate * halves[1], wanted);
      continue;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* const at = to + half * kLanes;
      const int count = wanted - half * kLanes;
      if (out.kind == Output::Kind::kAdd) halves[half] = load_some(at, count) + out.factor * halves[half];
      store_some(at, halves[half], count);
    }
  }
}

}  // namespace paceline
