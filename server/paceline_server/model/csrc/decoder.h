// A Llama-like decoder: embedding, layers, head; one call a step. The families differ in what is optional here.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "pool.h"

namespace paceline {

// Mirrored by native.py.
struct DecoderShape {
  int32_t hidden;
  int32_t intermediate;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rotary;            // elements of a head that turn, from the first
  int32_t vocabulary;
  int32_t norm_whole_rows;   // query and key norms span all heads (OLMo 2), not each head (Qwen 3)
  int32_t gelu;              // activation of the MLP (Gemma), else SiLU
  int32_t weight_format;     // WeightFormat of the layers
  int32_t head_format;       // WeightFormat of the head
  int32_t down_factor;       // inputs of the down projection go through hadamard() with this factor; 1: they do not
  float epsilon;
  float attention_scale;
  float attention_softcap;   // 0: none
  float embedding_scale;
  float residual_scale;
  float logits_scale;
  float logits_softcap;      // 0: none
};

// One layer; weights that a family lacks are null. Norms precede attention and MLP (Llama), follow them on the way back
// to the stream (OLMo 2), or both (Gemma). Mirrored by native.py.
struct LayerSource {
  int32_t window;        // keys that a row sees at most; 0: all
  int32_t rotary_table;  // which of StepInput's
  Source attention_norm, attention_after_norm, mlp_norm, mlp_after_norm;
  Source query, key, value, output;
  Source query_bias, key_bias, value_bias, output_bias;
  Source query_norm, key_norm;
  Source gate, up, down;
  Source gate_bias, up_bias, down_bias;
};

// Tokens of a step beyond StepShape.
struct StepInput {
  const int64_t* token_ids;  // [T]
  const float* cosine;       // [tables, T, rotary]
  const float* sine;         // [tables, T, rotary]
  int64_t logits_rows_count;
  const int64_t* logits_rows;  // [R], ascending
};

// Where the time of a step goes. Mirrored by fused_decoder.py.
enum class Stage { kRows, kAttention, kProjections, kOutput, kGated, kDown, kHead, kCount };

// Adds the time since the last lap to a stage: 20 ns a lap, so it always runs.
class Stopwatch {
 public:
  using Clock = std::chrono::steady_clock;
  void start() { last_ = Clock::now(); }
  void lap(Stage stage) {
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(stage)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  const std::array<double, static_cast<size_t>(Stage::kCount)>& seconds() const { return seconds_; }

 private:
  Clock::time_point last_;
  std::array<double, static_cast<size_t>(Stage::kCount)> seconds_{};
};

class Decoder {
 public:
  Decoder(Pool& pool, const DecoderShape& shape, Source embedding, Source final_norm, Source head, Source head_bias);

  // Packs the weights; they may be freed after.
  void add_layer(const LayerSource& source);

  // Compute T tokens, write their keys and values, and give the logits [R, vocabulary] of R rows.
  void step(Attention& attention, const StepShape& shape, const StepInput& input, float* logits);

  // Of all steps so far, by stage.
  const Stopwatch& stopwatch() const { return stopwatch_; }

 private:
  struct Layer {
    int32_t window, rotary_table;
    std::vector<float> attention_norm, attention_after_norm, mlp_norm, mlp_after_norm, query_norm, key_norm;
    Matrix projections, output, gated, down;
  };

  // Where a block of a layer gets its rows from and how its result joins the residual stream.
  Rows normed(const std::vector<float>& norm, const Matrix& next, const float* from, int rows);
  Rows prepared(const Matrix& next, const float* from, int rows);
  void add(const Matrix& last, Stage stage, const Rows& rows, const std::vector<float>& norm);
  void multiply(const Matrix& matrix, Stage stage, const Rows& rows, const Output& out);
  void attend(const Layer& layer, int index, Attention& attention, const StepShape& shape, const StepInput& input);
  void keep_wanted(const StepInput& input);
  void feed_forward(const Layer& layer, int rows);
  void embed(const int64_t* token_ids, int rows);
  void place_keys(const Layer& layer, int index, Attention& attention, const StepShape& shape, const StepInput& input);

  int projected() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }

  Pool& pool_;
  DecoderShape shape_;
  Source embedding_;
  std::vector<float> final_norm_;
  Arena weights_;  // of all matrices
  Matrix head_;
  std::vector<Layer> layers_;
  Stopwatch stopwatch_;
  // Of a step: residual stream, what is projected from it, results of attention, of the gated product, of norms.
  Scratch<float> stream_, projected_, attended_, activated_, added_;
  Scratch<int32_t> prepared_;
  Scratch<RowScale> scales_;
};

}  // namespace paceline
