// The library's C interface, which native.py calls through ctypes. Handles are freed by the function beside them.
//
// Nothing throws across the interface: what allocates returns null when memory is short.
#include <new>

#include "attention.h"
#include "decoder.h"
#include "sampler.h"

using paceline::Attention;
using paceline::CacheShape;
using paceline::Decoder;
using paceline::DecoderShape;
using paceline::Draw;
using paceline::LayerSource;
using paceline::Pool;
using paceline::ScoreRule;
using paceline::Source;
using paceline::StepInput;
using paceline::StepShape;
using paceline::WeightFormat;
using paceline::product_rate;

namespace {

template <class Body>
auto null_without_memory(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

// All else is hidden: libraries of several instruction sets can be open at once, each with functions of its own.
#pragma GCC visibility push(default)
extern "C" {

// Multiply-adds per second of one core; format: see tile.h.
double paceline_product_rate(int format) { return product_rate(static_cast<WeightFormat>(format)); }

Pool* paceline_pool_new(int threads) {
  return null_without_memory([&] { return new Pool(threads); });
}
void paceline_pool_free(Pool* pool) { delete pool; }

Attention* paceline_attention_new(Pool* pool, const CacheShape* shape) {
  return null_without_memory([&] { return new Attention(*pool, *shape); });
}
void paceline_attention_free(Attention* attention) { delete attention; }

void paceline_attention_plan(Attention* attention, const StepShape* step, int heads) {
  attention->plan(*step, heads);
}

int64_t paceline_attention_block_bytes(Attention* attention) {
  return static_cast<int64_t>(attention->cache().block_bytes());
}
void paceline_attention_copy_block(Attention* attention, int64_t source, int64_t target) {
  attention->cache().copy_block(source, target);
}
// host: block_bytes of memory.
void paceline_attention_save_block(Attention* attention, int64_t block, char* host) {
  attention->cache().save_block(block, host);
}
void paceline_attention_load_block(Attention* attention, const char* host, int64_t block) {
  attention->cache().load_block(host, block);
}

// key and value: [T, kv_heads, head_dim], contiguous.
void paceline_attention_write(Attention* attention, const StepShape* step, int layer, const float* key,
                              const float* value) {
  const CacheShape& shape = attention->cache().shape();
  for (int64_t row = 0; row < step->tokens; ++row) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      const ptrdiff_t at = (row * shape.kv_heads + head) * shape.head_dim;
      attention->cache().write(layer, step->slots[row], head, key + at, value + at);
    }
  }
}

// query and out: [T, heads, head_dim], contiguous.
void paceline_attention_forward(Attention* attention, int layer, const float* query, int heads, const ScoreRule* rule,
                                float* out) {
  attention->forward(layer, query, ptrdiff_t(heads) * attention->cache().shape().head_dim, *rule, out);
}

Decoder* paceline_decoder_new(Pool* pool, const DecoderShape* shape, const Source* embedding,
                              const Source* final_norm, const Source* head, const Source* head_bias) {
  return null_without_memory([&] { return new Decoder(*pool, *shape, *embedding, *final_norm, *head, *head_bias); });
}
void paceline_decoder_free(Decoder* decoder) { delete decoder; }

// Returns null when memory is short, else the decoder.
Decoder* paceline_decoder_add_layer(Decoder* decoder, const LayerSource* source) {
  return null_without_memory([&] {
    decoder->add_layer(*source);
    return decoder;
  });
}

// Returns null when memory is short, else the decoder.
Decoder* paceline_decoder_step(Decoder* decoder, Attention* attention, const StepShape* shape, const StepInput* input,
                               float* logits) {
  return null_without_memory([&] {
    decoder->step(*attention, *shape, *input, logits);
    return decoder;
  });
}

// Draw a token for each row of logits, [rows, vocabulary].
void paceline_draw(Pool* pool, const float* logits, int64_t rows, int64_t vocabulary, const Draw* draws,
                   int64_t* tokens) {
  pool->run(static_cast<int>(rows), [&](int row) {
    tokens[row] = paceline::draw_token(logits + row * vocabulary, vocabulary, draws[row]);
  });
}

// Seconds that all steps so far took, by Stage.
void paceline_decoder_seconds(const Decoder* decoder, double* seconds) {
  for (const double one : decoder->stopwatch().seconds()) *seconds++ = one;
}

}  // extern "C"
#pragma GCC visibility pop
