#include "query_rows.h"

#include <algorithm>
#include <cstring>

#include "rows.h"
#include "tile.h"

namespace paceline {
namespace {

constexpr float kMasked = -1e30f;  // finite: the difference of two of them is a number
constexpr float kLog2E = 1.44269504088896341f;

template <class Format>
constexpr Form kForm = Format::kActivations == Format::kValues ? Form::kFloat32 : Form::kPairs;

// Words of the weights of `keys` keys.
template <class Format>
constexpr int weight_words(int keys) {
  return keys / Format::kValues * Format::kActivations;
}

// Scores of kLanes keys, of which those in [begin, end) are seen.
Floats mask(Floats scores, int begin, int end) {
  const Ints number = lane_numbers();
  scores = number < splat(end) ? scores : splat(kMasked);
  return number < splat(begin) ? splat(kMasked) : scores;
}

}  // namespace

template <class Format>
QueryRows<Format>::QueryRows(const Cache& cache, const ScoreRule& rule, int rows)
    : rows_(rows),
      dim_(cache.shape().head_dim),
      columns_(cache.value_columns()),
      window_(rule.window),
      // Soft-capped scores come out of the products as what tanh takes.
      factor_(rule.softcap > 0.0f ? rule.scale / rule.softcap : rule.scale * kLog2E),
      softcap_(rule.softcap * kLog2E),
      depth_((dim_ + Format::kValues - 1) / Format::kValues),
      query_words_(ptrdiff_t(depth_) * Format::kActivations),
      work_(workspace()) {
  work_.query.resize(static_cast<size_t>(kRowsAtOnce * query_words_) + 2);  // a row may be padded by a word or two
  work_.scores.resize(kRowsAtOnce * kGroupKeys);
  work_.scaled.resize(static_cast<size_t>(dim_));
  work_.gathered.assign(static_cast<size_t>(rows) * columns_, 0.0f);
}

template <class Format>
typename QueryRows<Format>::Workspace& QueryRows<Format>::workspace() {
  static thread_local Workspace work;
  return work;
}

template <class Format>
void QueryRows<Format>::take(int row, const float* query, int end) {
  states_[row].maximum = kMasked;
  states_[row].sum = Floats{};
  range_[row] = {window_ > 0 ? std::max(0, end - window_) : 0, end};
  for (int d = 0; d < dim_; ++d) work_.scaled[static_cast<size_t>(d)] = query[d] * factor_;
  prepare_row(kForm<Format>, work_.scaled.data(), dim_, work_.query.data() + row * query_words_, nullptr);
}

// The keys of a group that a row sees, counted from the group's first.
template <class Format>
typename QueryRows<Format>::Keys QueryRows<Format>::seen(int row, Keys group) const {
  return {std::max(range_[row].begin, group.begin) - group.begin, std::min(range_[row].end, group.end) - group.begin};
}

template <class Format>
void QueryRows<Format>::attend(TileReader& reader) {
  const int end = reader.range().end;
  for (int first = reader.range().begin; first < end; first += kGroupKeys) {
    const Keys group{first, std::min(end, first + kGroupKeys)};
    const Group keys = reader.read(first);
    bool fetched = false;
    for (int row = 0; row < rows_; row += Format::kRows) {
      const int rows = std::min(Format::kRows, rows_ - row);
      const RowTile tile{row, rows, {seen(row, group).begin, seen(row + rows - 1, group).end}, !fetched};
      if (tile.seen.begin >= tile.seen.end) continue;
      score(tile, keys);
      const int columns = (tile.seen.end + kTileColumns - 1) / kTileColumns * kTileColumns;
      for (int one = row; one < row + rows; ++one) soften(one, seen(one, group), columns);
      gather(tile, keys);
      fetched = true;
    }
  }
}

template <class Format>
void QueryRows<Format>::score(const RowTile& tile, const Group& keys) {
  const TileFunction multiply = tile_function<Format>(tile.rows);
  const int32_t* const query = work_.query.data() + tile.row * query_words_;
  for (int column = tile.seen.begin / kTileColumns * kTileColumns; column < tile.seen.end; column += kTileColumns) {
    const Half &left = keys.halves[column / kLanes], &right = keys.halves[column / kLanes + 1];
    const ptrdiff_t stride = left.key_stride;
    const Run run{left.keys, right.keys, depth_, tile.fetches ? left.next_keys : nullptr,
                  stride * ptrdiff_t{sizeof(int32_t)}};
    multiply({query, query_words_, &run, 1, 0, stride, scores(tile.row) + column, kGroupKeys, false});
  }
}

// Turn a row's scores into powers of two relative to its maximum, in the form in which they weigh the values. What the
// row has gathered so far is scaled when the maximum grows.
template <class Format>
void QueryRows<Format>::soften(int row, Keys seen, int columns) {
  int32_t* const weights = scores(row);
  if (seen.begin >= seen.end) {
    std::memset(weights, 0, sizeof(int32_t) * static_cast<size_t>(columns));
    return;
  }
  float* const exponents = reinterpret_cast<float*>(weights);
  const bool changed = softcap_ > 0.0f || seen.begin > 0 || seen.end < columns;
  Floats highest = splat(kMasked);
  for (int column = 0; column < columns; column += kLanes) {
    Floats some = load(exponents + column);
    if (changed) {
      if (softcap_ > 0.0f) some = splat(softcap_) * tanh_of(some);
      some = mask(some, seen.begin - column, seen.end - column);
      store(exponents + column, some);
    }
    highest = larger(some, highest);
  }
  State& state = states_[row];
  if (any_above(highest, state.maximum)) {
    const float shrink = exp2_of(state.maximum - maximum_of(highest));
    state.maximum = maximum_of(highest);
    state.sum *= splat(shrink);
    scale_row(gathered(row), shrink, columns_);
  }
  const Floats maximum = splat(state.maximum);
  Floats sum = state.sum;
  for (int column = 0; column < columns; column += kTileColumns) {
    const Floats left = exp2_of(load(exponents + column) - maximum);
    const Floats right = exp2_of(load(exponents + column + kLanes) - maximum);
    sum += left + right;
    Format::pack(weights + weight_words<Format>(column), left, right);
  }
  state.sum = sum;
}

template <class Format>
void QueryRows<Format>::gather(const RowTile& tile, const Group& keys) {
  const TileFunction multiply = tile_function<Format>(tile.rows);
  const int first = tile.seen.begin / kLanes, halves = (tile.seen.end + kLanes - 1) / kLanes - first;
  Run runs[kGroupHalves];
  for (int index = 0; index < halves; ++index) {
    const Half& half = keys.halves[first + index];
    const int tokens = std::min(kLanes, tile.seen.end - (first + index) * kLanes);
    runs[index] = {half.values, half.values + kLanes, (tokens + Format::kValues - 1) / Format::kValues,
                   tile.fetches ? half.next_values : nullptr, columns_ * ptrdiff_t{sizeof(int32_t)}};
  }
  const int32_t* const weights = scores(tile.row) + weight_words<Format>(first * kLanes);
  for (int column = 0; column < columns_; column += kTileColumns) {
    multiply({weights, kGroupKeys, runs, halves, column, columns_, gathered(tile.row) + column, columns_, true});
  }
}

template <class Format>
void QueryRows<Format>::finish(int row, float* out) const {
  const float inverse = 1.0f / sum_of(states_[row].sum);
  const float* const from = gathered(row);
  for (int d = 0; d < dim_; ++d) out[d] = from[d] * inverse;
}

template <class Format>
void QueryRows<Format>::save(int row, float* out) const {
  std::memcpy(out, gathered(row), sizeof(float) * static_cast<size_t>(columns_));
  out[columns_] = states_[row].maximum;
  out[columns_ + 1] = sum_of(states_[row].sum);
}

template class QueryRows<Float32>;
template class QueryRows<Bfloat16Widened>;
#if defined(__AVX512BF16__)
template class QueryRows<Bfloat16Paired>;
#endif

}  // namespace paceline
