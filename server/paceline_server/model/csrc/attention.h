// Causal attention of a step's packed tokens over the paged cache: prefill chunks and decodes in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.h"
#include "memory.h"
#include "pool.h"

namespace paceline {

// What all layers of a step share; see packing.PackedBatch. T tokens of S sequences.
struct StepShape {
  int64_t tokens;
  int64_t sequences;
  int64_t table_width;
  const int64_t* slots;         // [T]
  const int64_t* query_starts;  // [S + 1]
  const int64_t* kv_lengths;    // [S]
  const int64_t* block_table;   // [S, table_width]
};

class Attention {
 public:
  Attention(Pool& pool, const CacheShape& shape) : pool_(pool), cache_(shape) {}

  Cache& cache() { return cache_; }

  // Cut the step into tasks. Once a step, before the first `forward`.
  void plan(const StepShape& step, int heads);

  // Attend. The step's keys and values must be in the cache already.
  //   query: rows of [heads, head_dim], row_stride floats apart
  //   out: [T, heads, head_dim]
  void forward(int layer, const float* query, ptrdiff_t row_stride, float scale, float* out);

 private:
  // The query rows of a few neighbouring tokens and heads that share a key/value head, over a range of keys.
  struct Task {
    int32_t sequence;
    int32_t first_token, tokens;  // in the sequence's slice
    int32_t head, heads;          // query heads
    int32_t kv_begin, kv_end;
    int64_t part;  // where its unfinished result goes, in rows of `parts_`; -1 if it is the whole
  };
  // Unfinished results of one task's rows that must be put together.
  struct Merge {
    int32_t row, head, heads;
    int64_t part, parts;
  };

  template <class Format>
  void attend(const Task& task, int layer, const float* query, ptrdiff_t row_stride, float scale, float* out);
  void merge(const Merge& merge, float* out) const;
  int part_stride() const { return cache_.value_columns() + 2; }

  Pool& pool_;
  Cache cache_;
  StepShape step_{};
  int heads_ = 0;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  Scratch<float> parts_;  // [part, row of the task, output then maximum then sum]
};

}  // namespace paceline
