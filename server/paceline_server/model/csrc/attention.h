// Causal attention of a step's packed tokens over the paged cache: prefill chunks and decodes in one call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache.h"
#include "memory.h"
#include "pool.h"
#include "tile_reader.h"

namespace paceline {

// What all layers of a step share; see packing.PackedBatch. T tokens of S sequences.
struct StepShape {
  int64_t tokens;
  int64_t sequences;
  int64_t table_width;
  const int64_t* slots;         // [T]
  const int64_t* query_starts;  // [S + 1]
  const int64_t* kv_lengths;    // [S]
  const int64_t* deterministic; // [S], 1: one order of sums, whatever else is in the step
  const int64_t* block_table;   // [S, table_width]
};

// How a layer scores the keys that a row sees. Mirrored by native.py.
struct ScoreRule {
  float scale;
  float softcap;   // a score s becomes softcap * tanh(s / softcap); 0 leaves it
  int32_t window;  // keys that a row sees at most, its own included; 0: all
};

class Attention {
 public:
  Attention(Pool& pool, const CacheShape& shape) : pool_(pool), cache_(pool, shape) {}

  Cache& cache() { return cache_; }

  // Take note of the step. Once a step, before the first `forward`.
  void plan(const StepShape& step, int heads);

  // Attend. The step's keys and values must be in the cache already.
  //   query: rows of [heads, head_dim], row_stride floats apart
  //   out: [T, heads, head_dim]
  void forward(int layer, const float* query, ptrdiff_t row_stride, const ScoreRule& rule, float* out);

 private:
  // The query rows of a few neighbouring tokens and heads that share a key/value head, over a range of keys.
  struct Task {
    int32_t sequence;
    int32_t first_token, tokens;  // in the sequence's slice
    int32_t head, heads;          // query heads
    int32_t kv_begin, kv_end;
    int64_t part;  // first of the rows of `parts_` for its unfinished results; -1 if they are whole
  };
  // Unfinished results of the same rows that must be put together.
  struct Merge {
    int64_t token;  // of the step
    int32_t head, heads;
    int32_t rows;
    int64_t part, parts;
  };
  // The step cut into tasks, for the layers of one window.
  struct Plan {
    int32_t window;
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    int64_t part_rows = 0;
  };

  const Plan& plan_for(int32_t window);
  void cut(Plan& plan, int32_t sequence, int32_t first, int32_t count, int most_parts) const;
  int past(int32_t sequence) const {  // tokens of the sequence before this step's
    return static_cast<int>(step_.kv_lengths[sequence] - step_.query_starts[sequence + 1] + step_.query_starts[sequence]);
  }
  // The keys of a task, and those that its thread will probably need after it.
  struct Ranges {
    KeyRange own;
    std::optional<KeyRange> next;
  };
  KeyRange range_of(const Task& task, int layer) const;
  template <class Format>
  void attend(const Task& task, const Ranges& ranges, const float* query, ptrdiff_t row_stride, const ScoreRule& rule,
              float* out) const;
  void merge(const Merge& merge, float* out) const;
  int part_stride() const { return cache_.value_columns() + 2; }

  Pool& pool_;
  Cache cache_;
  StepShape step_{};
  int heads_ = 0;
  std::vector<Plan> plans_;  // one a window, each made when its first layer asks
  Scratch<float> parts_;  // [row of a part, weighted sums then maximum then sum of weights]
};

}  // namespace paceline
