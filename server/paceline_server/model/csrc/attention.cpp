#include "attention.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "query_rows.h"
#include "rows.h"
#include "tile.h"
#include "tile_reader.h"

namespace paceline {
namespace {

constexpr int kShortestPart = 256;  // keys; a shorter part costs more to merge than it brings

}  // namespace

void Attention::plan(const StepShape& step, int heads) {
  step_ = step;
  heads_ = heads;
  plans_.clear();
}

const Attention::Plan& Attention::plan_for(int32_t window) {
  for (const Plan& plan : plans_) {
    if (plan.window == window) return plan;
  }
  plans_.push_back({window, {}, {}});
  Plan& plan = plans_.back();
  const int kv_heads = cache_.shape().kv_heads, tokens_at_once = std::max(1, kRowsAtOnce / (heads_ / kv_heads));
  const int64_t without_parts = step_.sequences * kv_heads;
  const int most_parts = without_parts >= 4 * pool_.threads() ? 1 : 4 * pool_.threads();
  for (int32_t sequence = 0; sequence < step_.sequences; ++sequence) {
    const int tokens = static_cast<int>(step_.query_starts[sequence + 1] - step_.query_starts[sequence]);
    const bool whole = tokens > tokens_at_once || step_.deterministic[sequence] != 0;
    for (int first = 0; first < tokens; first += tokens_at_once) {
      cut(plan, sequence, first, std::min(tokens_at_once, tokens - first), whole ? 1 : most_parts);
    }
  }
  // Long tasks first: the threads then end at about the same time.
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [](const Task& left, const Task& right) {
    return (left.kv_end - left.kv_begin) * left.tokens > (right.kv_end - right.kv_begin) * right.tokens;
  });
  parts_.reserve(size_t(plan.part_rows) * part_stride());
  return plan;
}

// Add the tasks of `count` neighbouring tokens: for each group of heads, and where there is little else to do, for
// several ranges of keys.
void Attention::cut(Plan& plan, int32_t sequence, int32_t first, int32_t count, int most_parts) const {
  const int group = heads_ / cache_.shape().kv_heads, heads_at_once = std::min(group, kRowsAtOnce);
  const int end = past(sequence) + first + count, oldest = plan.window > 0 ? end - count + 1 - plan.window : 0;
  const int begin = std::max(0, oldest) / kGroupKeys * kGroupKeys, length = end - begin;
  const int parts = std::clamp(length / kShortestPart, 1, most_parts);
  for (int head = 0; head < heads_; head += heads_at_once) {
    const int these = std::min(heads_at_once, (head / group + 1) * group - head), rows = count * these;
    int from = begin;
    for (int index = 0; index < parts; ++index) {
      const int to = index + 1 == parts ? end : begin + length * (index + 1) / parts / kGroupKeys * kGroupKeys;
      const int64_t part = parts == 1 ? -1 : plan.part_rows + int64_t{index} * rows;
      plan.tasks.push_back({sequence, first, count, head, these, from, to, part});
      from = to;
    }
    if (parts > 1) {
      plan.merges.push_back({step_.query_starts[sequence] + first, head, these, rows, plan.part_rows, parts});
      plan.part_rows += int64_t{parts} * rows;
    }
    head += these - heads_at_once;  // the next group of query heads begins right after the last of this one
  }
}

void Attention::forward(int layer, const float* query, ptrdiff_t row_stride, const ScoreRule& rule, float* out) {
  const Plan& plan = plan_for(rule.window);
  pool_.run(static_cast<int>(plan.tasks.size()), [&](int index) {
    const Task& task = plan.tasks[static_cast<size_t>(index)];
    // Other threads take the tasks between.
    const size_t later = static_cast<size_t>(index + pool_.threads());
    const Ranges ranges{range_of(task, layer),
                        later < plan.tasks.size() ? std::optional(range_of(plan.tasks[later], layer)) : std::nullopt};
    if (cache_.format() != CacheFormat::kBfloat16) return attend<Float32>(task, ranges, query, row_stride, rule, out);
#if defined(__AVX512BF16__)
    if (bfloat16_paired_is_faster()) return attend<Bfloat16Paired>(task, ranges, query, row_stride, rule, out);
#endif
    // Widened in each product or once for all rows: the same numbers in the same order.
    if (task.tokens * task.heads <= Bfloat16Widened::kRows) {
      return attend<Bfloat16Widened>(task, ranges, query, row_stride, rule, out);
    }
    attend<Float32>(task, ranges, query, row_stride, rule, out);
  });
  for (const Merge& one : plan.merges) merge(one, out);
}

KeyRange Attention::range_of(const Task& task, int layer) const {
  return {layer, task.head / (heads_ / cache_.shape().kv_heads),
          step_.block_table + task.sequence * step_.table_width, task.kv_begin, task.kv_end};
}

template <class Format>
void Attention::attend(const Task& task, const Ranges& ranges, const float* query, ptrdiff_t row_stride,
                       const ScoreRule& rule, float* out) const {
  static thread_local std::vector<int32_t> copied;
  const int dim = cache_.shape().head_dim, count = task.tokens * task.heads;
  const int64_t first_token = step_.query_starts[task.sequence] + task.first_token;
  QueryRows<Format> rows(cache_, rule, count);
  for (int row = 0; row < count; ++row) {
    const int token = row / task.heads, head = task.head + row % task.heads;
    rows.take(row, query + (first_token + token) * row_stride + ptrdiff_t(head) * dim,
              past(task.sequence) + task.first_token + token + 1);
  }
  TileReader reader(cache_, ranges.own, ranges.next, std::is_same_v<Format, Float32>, copied);
  rows.attend(reader);
  for (int row = 0; row < count; ++row) {
    if (task.part >= 0) {
      rows.save(row, parts_.get() + (task.part + row) * part_stride());
    } else {
      rows.finish(row, out + ((first_token + row / task.heads) * heads_ + task.head + row % task.heads) * dim);
    }
  }
}

void Attention::merge(const Merge& merge, float* out) const {
  const int dim = cache_.shape().head_dim, columns = cache_.value_columns();
  const ptrdiff_t stride = ptrdiff_t(merge.rows) * part_stride();
  for (int row = 0; row < merge.rows; ++row) {
    const float* const first = parts_.get() + (merge.part + row) * part_stride();
    float maximum = first[columns], sum = 0.0f;
    for (int64_t part = 1; part < merge.parts; ++part) maximum = std::max(maximum, first[part * stride + columns]);
    float* const to = out + ((merge.token + row / merge.heads) * heads_ + merge.head + row % merge.heads) * dim;
    std::memset(to, 0, sizeof(float) * static_cast<size_t>(dim));
    for (int64_t part = 0; part < merge.parts; ++part) {
      const float* const one = first + part * stride;
      const float factor = exp2_of(one[columns] - maximum);
      sum += factor * one[columns + 1];
      for (int d = 0; d < dim; ++d) to[d] += factor * one[d];
    }
    scale_row(to, 1.0f / sum, dim);
  }
}

}  // namespace paceline
