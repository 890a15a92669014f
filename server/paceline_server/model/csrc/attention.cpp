#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rows.h"
#include "tile.h"
#include "tile_reader.h"

namespace paceline {
namespace {

constexpr float kMasked = -1e30f;  // finite: the difference of two of them is a number
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kShortestPart = 256;  // keys; a shorter part costs more to merge than it brings

// The running softmax of one row.
struct RowState {
  float maximum = kMasked;
  Floats sum{};
};

// The columns [begin, end) of a tile that a row may see.
struct Visible {
  int begin, end;
};

Floats mask(Floats scores, Visible visible) {
  const Ints number = lane_numbers();
  scores = number < splat(visible.end) ? scores : splat(kMasked);
  return number < splat(visible.begin) ? splat(kMasked) : scores;
}

// Turn a row's scores of a tile into powers of two relative to its maximum, in the form in which they weigh the values.
// What the row has gathered so far is scaled when the maximum grows. softcap: in powers of two, or 0.
template <class Format>
void soften(const float* scores, Visible visible, float softcap, RowState& state, float* gathered, int columns,
            int32_t* weights) {
  Floats left = load(scores), right = load(scores + kLanes);
  if (softcap > 0.0f) {
    left = splat(softcap) * tanh_of(left);
    right = splat(softcap) * tanh_of(right);
  }
  if (visible.begin > 0 || visible.end < kTileColumns) {
    left = mask(left, visible);
    right = mask(right, {visible.begin - kLanes, visible.end - kLanes});
  }
  const Floats higher = left > right ? left : right;
  if (any_above(higher, state.maximum)) {
    const float highest = maximum_of(higher);
    const float shrink = exp2_of(state.maximum - highest);
    state.maximum = highest;
    state.sum *= splat(shrink);
    scale_row(gathered, shrink, columns);
  }
  left = exp2_of(left - splat(state.maximum));
  right = exp2_of(right - splat(state.maximum));
  state.sum += left + right;
  Format::pack(weights, left, right);
}

template <class Format>
constexpr Form kForm = Format::kActivations == Format::kValues ? Form::kFloat32 : Form::kPairs;

// Scratch memory of one thread, for any number of rows of a task.
struct Workspace {
  std::vector<int32_t> query, weights, copied;
  std::vector<float> gathered, scaled;
};

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
  const int kv_heads = cache_.shape().kv_heads, tokens_at_once = std::max(1, kTileRows / (heads_ / kv_heads));
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
  parts_.reserve(size_t(plan.parts) * kTileRows * part_stride());
  return plan;
}

// Add the tasks of `count` neighbouring tokens: for each group of heads, and where there is little else to do, for
// several ranges of keys.
void Attention::cut(Plan& plan, int32_t sequence, int32_t first, int32_t count, int most_parts) const {
  const int group = heads_ / cache_.shape().kv_heads, heads_at_once = std::min(group, kTileRows);
  const int end = past(sequence) + first + count, oldest = plan.window > 0 ? end - count + 1 - plan.window : 0;
  const int begin = std::max(0, oldest) / kTileColumns * kTileColumns, length = end - begin;
  const int parts = std::clamp(length / kShortestPart, 1, most_parts);
  for (int head = 0; head < heads_; head += heads_at_once) {
    const int these = std::min(heads_at_once, (head / group + 1) * group - head);
    int from = begin;
    for (int index = 0; index < parts; ++index) {
      const int to = index + 1 == parts ? end : begin + length * (index + 1) / parts / kTileColumns * kTileColumns;
      plan.tasks.push_back({sequence, first, count, head, these, from, to, parts == 1 ? -1 : plan.parts + index});
      from = to;
    }
    if (parts > 1) {
      plan.merges.push_back(
          {static_cast<int32_t>(step_.query_starts[sequence]) + first, head, these, plan.parts, parts});
      plan.parts += parts;
    }
    head += these - heads_at_once;  // the next group of query heads begins right after the last of this one
  }
}

void Attention::forward(int layer, const float* query, ptrdiff_t row_stride, const ScoreRule& rule, float* out) {
  const Plan& plan = plan_for(rule.window);
  pool_.run(static_cast<int>(plan.tasks.size()), [&](int index) {
    const Task& task = plan.tasks[static_cast<size_t>(index)];
    if (cache_.format() != CacheFormat::kBfloat16) return attend<Float32>(task, layer, query, row_stride, rule, out);
#if defined(__AVX512BF16__)
    if (bfloat16_paired_is_faster()) return attend<Bfloat16Paired>(task, layer, query, row_stride, rule, out);
#endif
    attend<Bfloat16Widened>(task, layer, query, row_stride, rule, out);
  });
  for (const Merge& one : plan.merges) merge(one, out);
}

template <class Format>
void Attention::attend(const Task& task, int layer, const float* query, ptrdiff_t row_stride,
                       const ScoreRule& rule, float* out) {
  static thread_local Workspace work;
  const int dim = cache_.shape().head_dim, columns = cache_.value_columns(), rows = task.tokens * task.heads;
  const int kv_head = task.head / (heads_ / cache_.shape().kv_heads);
  const int64_t* const table = step_.block_table + task.sequence * step_.table_width;
  const int64_t first_row = step_.query_starts[task.sequence] + task.first_token;
  // Scores are powers of two; soft-capped, they come out of the products as what tanh takes.
  const float factor = rule.softcap > 0.0f ? rule.scale / rule.softcap : rule.scale * kLog2E;
  constexpr ptrdiff_t kWeightWords = kTileColumns / Format::kValues * Format::kActivations;
  const int depth = (dim + Format::kValues - 1) / Format::kValues;  // words of a key
  const ptrdiff_t query_words = depth * Format::kActivations;
  work.query.resize(size_t(kTileRows * query_words) + 2);
  work.weights.resize(kTileRows * kWeightWords);
  work.gathered.assign(size_t(kTileRows) * columns, 0.0f);
  work.scaled.resize(size_t(dim) + 1);
  RowState states[kTileRows];
  Visible seen[kTileRows];  // keys of the sequence that a row may see
  for (int row = 0; row < rows; ++row) {
    const int token = row / task.heads, head = task.head + row % task.heads;
    const int end = past(task.sequence) + task.first_token + token + 1;
    seen[row] = {rule.window > 0 ? std::max(0, end - rule.window) : 0, end};
    const float* const from = query + (first_row + token) * row_stride + ptrdiff_t(head) * dim;
    for (int d = 0; d < dim; ++d) work.scaled[d] = from[d] * factor;
    prepare_row(kForm<Format>, work.scaled.data(), dim, work.query.data() + row * query_words, nullptr);
  }
  TileReader reader(cache_, layer, kv_head, table, work.copied);
  const TileFunction multiply = tile_function<Format>(rows);
  alignas(64) float scores[kTileRows * kTileColumns];
  for (int begin = task.kv_begin; begin < task.kv_end; begin += kTileColumns) {
    const int counts[2] = {std::min(kLanes, task.kv_end - begin), std::clamp(task.kv_end - begin - kLanes, 0, kLanes)};
    Half halves[2] = {reader.read(begin, counts[0], 0), {}};
    halves[1] = counts[1] > 0 ? reader.read(begin + kLanes, counts[1], 1) : halves[0];
    for (int next = begin + kTileColumns; next < std::min(task.kv_end, begin + 2 * kTileColumns); next += kLanes) {
      reader.prefetch(next);
    }
    multiply({work.query.data(), query_words, {{halves[0].keys, halves[1].keys, depth}, {}},
              halves[0].key_stride, scores, kTileColumns, false});
    for (int row = 0; row < rows; ++row) {
      const Visible visible = {seen[row].begin - begin, std::min(seen[row].end, task.kv_end) - begin};
      int32_t* const weights = work.weights.data() + row * kWeightWords;
      if (visible.end > 0 && visible.begin < kTileColumns) {
        soften<Format>(scores + row * kTileColumns, visible, rule.softcap * kLog2E, states[row],
                       work.gathered.data() + ptrdiff_t(row) * columns, columns, weights);
      } else {
        std::memset(weights, 0, sizeof(int32_t) * kWeightWords);
      }
    }
    const int words[2] = {(counts[0] + Format::kValues - 1) / Format::kValues,
                          (counts[1] + Format::kValues - 1) / Format::kValues};
    for (int column = 0; column < columns; column += kTileColumns) {
      const int32_t *const first = halves[0].values + column, *const second = halves[1].values + column;
      multiply({work.weights.data(), kWeightWords, {{first, first + kLanes, words[0]}, {second, second + kLanes, words[1]}},
                columns, work.gathered.data() + column, columns, true});
    }
  }
  for (int row = 0; row < rows; ++row) {
    const float* const gathered = work.gathered.data() + ptrdiff_t(row) * columns;
    if (task.part >= 0) {
      float* const to = parts_.get() + (task.part * kTileRows + row) * part_stride();
      std::memcpy(to, gathered, sizeof(float) * static_cast<size_t>(columns));
      to[columns] = states[row].maximum;
      to[columns + 1] = sum_of(states[row].sum);
      continue;
    }
    const int64_t token = first_row + row / task.heads, head = task.head + row % task.heads;
    float* const to = out + (token * heads_ + head) * dim;
    const float inverse = 1.0f / sum_of(states[row].sum);
    for (int d = 0; d < dim; ++d) to[d] = gathered[d] * inverse;
  }
}

void Attention::merge(const Merge& merge, float* out) const {
  const int dim = cache_.shape().head_dim, columns = cache_.value_columns();
  for (int row = 0; row < merge.heads; ++row) {
    const float* const first = parts_.get() + (merge.part * kTileRows + row) * part_stride();
    const ptrdiff_t stride = ptrdiff_t(kTileRows) * part_stride();
    float maximum = kMasked, sum = 0.0f;
    for (int64_t part = 0; part < merge.parts; ++part) maximum = std::max(maximum, first[part * stride + columns]);
    float* const to = out + (int64_t(merge.row) * heads_ + merge.head + row) * dim;
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
