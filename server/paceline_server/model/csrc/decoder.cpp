#include "decoder.h"

#include <algorithm>
#include <cstring>

namespace paceline {
namespace {

std::vector<float> numbers(Source source, int count) {
  std::vector<float> values(source.data == nullptr ? 0 : static_cast<size_t>(count));
  source.read(0, static_cast<int>(values.size()), values.data());
  return values;
}

WeightFormat format_of(int32_t number) { return static_cast<WeightFormat>(number); }

// Run over rows on all threads; a few rows are not worth waking anybody.
template <class Body>
void for_rows(Pool& pool, int rows, const Body& body) {
  constexpr int kRowsPerTask = 4;
  pool.run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
    const int end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

// A row of floats for a thread's own use.
float* thread_row(int size) {
  static thread_local std::vector<float> row;
  if (row.size() < static_cast<size_t>(size)) row.resize(static_cast<size_t>(size));
  return row.data();
}

}  // namespace

Decoder::Decoder(Pool& pool, const DecoderShape& shape, Source embedding, Source final_norm, Source head,
                 Source head_bias)
    : pool_(pool),
      shape_(shape),
      embedding_(embedding),
      final_norm_(numbers(final_norm, shape.hidden)),
      head_(Matrix::pack(pool, weights_, {{head, head_bias, shape.vocabulary}}, shape.hidden,
                         format_of(shape.head_format))) {}

void Decoder::add_layer(const LayerSource& source) {
  const DecoderShape& s = shape_;
  const WeightFormat format = format_of(s.weight_format);
  const int query = s.heads * s.head_dim, key = s.kv_heads * s.head_dim;
  Layer layer;
  layer.window = source.window;
  layer.rotary_table = source.rotary_table;
  layer.attention_norm = numbers(source.attention_norm, s.hidden);
  layer.attention_after_norm = numbers(source.attention_after_norm, s.hidden);
  layer.mlp_norm = numbers(source.mlp_norm, s.hidden);
  layer.mlp_after_norm = numbers(source.mlp_after_norm, s.hidden);
  layer.query_norm = numbers(source.query_norm, s.norm_whole_rows ? query : s.head_dim);
  layer.key_norm = numbers(source.key_norm, s.norm_whole_rows ? key : s.head_dim);
  layer.projections = Matrix::pack(pool_, weights_,
                                   {{source.query, source.query_bias, query},
                                    {source.key, source.key_bias, key},
                                    {source.value, source.value_bias, key}},
                                   s.hidden, format);
  layer.output = Matrix::pack(pool_, weights_, {{source.output, source.output_bias, s.hidden}}, query, format);
  layer.gated = Matrix::pack_gated(pool_, weights_, {source.gate, source.gate_bias, s.intermediate},
                                   {source.up, source.up_bias, s.intermediate}, s.hidden, format);
  layer.down = Matrix::pack(pool_, weights_, {{source.down, source.down_bias, s.hidden}}, s.intermediate, format);
  layers_.push_back(std::move(layer));
}

void Decoder::step(Attention& attention, const StepShape& shape, const StepInput& input, float* logits) {
  const int rows = static_cast<int>(shape.tokens);
  const size_t tokens = static_cast<size_t>(rows);
  stream_.reserve(tokens * shape_.hidden);
  projected_.reserve(tokens * projected());
  attended_.reserve(tokens * shape_.heads * shape_.head_dim);
  activated_.reserve(tokens * shape_.intermediate);
  const int wanted = static_cast<int>(input.logits_rows_count);
  const int widest = std::max({shape_.hidden, shape_.heads * shape_.head_dim, shape_.intermediate});
  added_.reserve(tokens * shape_.hidden);
  prepared_.reserve(tokens * (widest + 1));
  scales_.reserve(tokens);
  stopwatch_.start();
  attention.plan(shape, shape_.heads);
  embed(input.token_ids, rows);
  for (size_t index = 0; index < layers_.size(); ++index) {
    attend(layers_[index], static_cast<int>(index), attention, shape, input);
    const bool last = index + 1 == layers_.size();
    if (last) keep_wanted(input);  // of the other tokens, nobody reads more than their keys and values
    feed_forward(layers_[index], last ? wanted : rows);
  }
  multiply(head_, Stage::kHead, normed(final_norm_, head_, stream_.get(), wanted),
           {Output::Kind::kStore, logits, shape_.vocabulary});
  if (shape_.logits_scale == 1.0f && shape_.logits_softcap == 0.0f) return;
  for_rows(pool_, wanted, [&](int row) {
    float* const one = logits + ptrdiff_t(row) * shape_.vocabulary;
    scale_row(one, shape_.logits_scale, shape_.vocabulary);
    if (shape_.logits_softcap > 0.0f) cap_row(one, shape_.logits_softcap, shape_.vocabulary);
  });
}

void Decoder::embed(const int64_t* token_ids, int rows) {
  for_rows(pool_, rows, [&](int row) {
    float* const to = stream_.get() + ptrdiff_t(row) * shape_.hidden;
    embedding_.read(token_ids[row] * shape_.hidden, shape_.hidden, to);
    scale_row(to, shape_.embedding_scale, shape_.hidden);
  });
}

void Decoder::attend(const Layer& layer, int index, Attention& attention, const StepShape& shape,
                     const StepInput& input) {
  const int rows = static_cast<int>(shape.tokens);
  multiply(layer.projections, Stage::kProjections,
           normed(layer.attention_norm, layer.projections, stream_.get(), rows),
           {Output::Kind::kStore, projected_.get(), projected()});
  place_keys(layer, index, attention, shape, input);
  stopwatch_.lap(Stage::kRows);
  attention.forward(index, projected_.get(), projected(),
                    {shape_.attention_scale, shape_.attention_softcap, layer.window}, attended_.get());
  stopwatch_.lap(Stage::kAttention);
}

// Rows whose logits are wanted become the first ones.
void Decoder::keep_wanted(const StepInput& input) {
  const int attended = shape_.heads * shape_.head_dim;
  for (int64_t row = 0; row < input.logits_rows_count; ++row) {
    const int64_t from = input.logits_rows[row];
    if (from == row) continue;
    std::memcpy(stream_.get() + row * shape_.hidden, stream_.get() + from * shape_.hidden,
                sizeof(float) * shape_.hidden);
    std::memcpy(attended_.get() + row * attended, attended_.get() + from * attended, sizeof(float) * attended);
  }
}

// What follows attention in a layer, for the first rows: its results join the stream, then the MLP.
void Decoder::feed_forward(const Layer& layer, int rows) {
  add(layer.output, Stage::kOutput, prepared(layer.output, attended_.get(), rows), layer.attention_after_norm);
  multiply(layer.gated, Stage::kGated, normed(layer.mlp_norm, layer.gated, stream_.get(), rows),
           {shape_.gelu ? Output::Kind::kGeglu : Output::Kind::kSwiglu, activated_.get(), shape_.intermediate});
  if (shape_.down_factor > 1) {
    for_rows(pool_, rows, [&](int row) {
      hadamard(activated_.get() + ptrdiff_t(row) * shape_.intermediate, shape_.down_factor, shape_.intermediate);
    });
  }
  add(layer.down, Stage::kDown, prepared(layer.down, activated_.get(), rows), layer.mlp_after_norm);
}

// Query and key norms, rotation, and the step's keys and values into the cache.
void Decoder::place_keys(const Layer& layer, int index, Attention& attention, const StepShape& shape,
                         const StepInput& input) {
  const int dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
  const ptrdiff_t table = layer.rotary_table * shape.tokens * shape_.rotary;
  for_rows(pool_, static_cast<int>(shape.tokens), [&](int row) {
    float* const query = projected_.get() + ptrdiff_t(row) * projected();
    float* const key = query + heads * dim;
    const float* const value = key + kv_heads * dim;
    if (!layer.query_norm.empty() && shape_.norm_whole_rows) {
      rms_norm(query, layer.query_norm.data(), shape_.epsilon, heads * dim, query);
      rms_norm(key, layer.key_norm.data(), shape_.epsilon, kv_heads * dim, key);
    }
    for (int head = 0; head < heads + kv_heads; ++head) {
      float* const one = query + ptrdiff_t(head) * dim;
      if (!layer.query_norm.empty() && !shape_.norm_whole_rows) {
        rms_norm(one, (head < heads ? layer.query_norm : layer.key_norm).data(), shape_.epsilon, dim, one);
      }
      const ptrdiff_t turn = table + ptrdiff_t(row) * shape_.rotary;
      rotate(one, input.cosine + turn, input.sine + turn, shape_.rotary);
    }
    for (int head = 0; head < kv_heads; ++head) {
      attention.cache().write(index, shape.slots[row], head, key + head * dim, value + head * dim);
    }
  });
}

Rows Decoder::normed(const std::vector<float>& norm, const Matrix& next, const float* from, int rows) {
  const int size = next.inputs();
  if (norm.empty()) return prepared(next, from, rows);
  const ptrdiff_t words = row_words(next.form(), size);
  for_rows(pool_, rows, [&](int row) {
    float* const buffer = thread_row(size);
    rms_norm(from + ptrdiff_t(row) * size, norm.data(), shape_.epsilon, size, buffer);
    prepare_row(next.form(), buffer, size, prepared_.get() + row * words, scales_.get() + row);
  });
  return {prepared_.get(), words, scales_.get(), rows};
}

Rows Decoder::prepared(const Matrix& next, const float* from, int rows) {
  const int size = next.inputs();
  const ptrdiff_t words = row_words(next.form(), size);
  if (next.form() == Form::kFloat32 && words == size) {
    return {reinterpret_cast<const int32_t*>(from), size, nullptr, rows};
  }
  for_rows(pool_, rows, [&](int row) {
    prepare_row(next.form(), from + ptrdiff_t(row) * size, size, prepared_.get() + row * words, scales_.get() + row);
  });
  return {prepared_.get(), words, scales_.get(), rows};
}

void Decoder::multiply(const Matrix& matrix, Stage stage, const Rows& rows, const Output& out) {
  stopwatch_.lap(Stage::kRows);
  matrix.multiply(pool_, rows, out);
  stopwatch_.lap(stage);
}

// Add a product to the residual stream, through a norm where the family wants one.
void Decoder::add(const Matrix& last, Stage stage, const Rows& rows, const std::vector<float>& norm) {
  if (norm.empty()) {
    multiply(last, stage, rows, {Output::Kind::kAdd, stream_.get(), shape_.hidden, shape_.residual_scale});
    return;
  }
  multiply(last, stage, rows, {Output::Kind::kStore, added_.get(), shape_.hidden});
  for_rows(pool_, rows.count, [&](int row) {
    float* const one = added_.get() + ptrdiff_t(row) * shape_.hidden;
    float* const stream = stream_.get() + ptrdiff_t(row) * shape_.hidden;
    rms_norm(one, norm.data(), shape_.epsilon, shape_.hidden, one);
    for (int i = 0; i < shape_.hidden; ++i) stream[i] += shape_.residual_scale * one[i];
  });
}

}  // namespace paceline
