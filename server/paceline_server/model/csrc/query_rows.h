// The arithmetic of attention for some query rows that share a key/value head: scores, a running softmax, weighted values.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "simd.h"
#include "tile_reader.h"

namespace paceline {

// Rows that attend together: whole tiles, and so many of them that fetching keys and values costs little beside the
// products with them.
inline constexpr int kRowsAtOnce = 96;
static_assert(kRowsAtOnce % kTileRows == 0);

// Online softmax (Milakov and Gimelshein, 2018) over groups of keys, as in FlashAttention (Dao et al., 2022). What a row
// becomes depends on its own query and on where ranges of keys begin, never on the rows beside it.
//
// Format: of keys and values as `TileReader` gives them.
template <class Format>
class QueryRows {
 public:
  // 1 <= rows <= kRowsAtOnce. A thread has one at a time: its scratch memory serves one after the other.
  QueryRows(const Cache& cache, const ScoreRule& rule, int rows);

  // Rows come in the order of their tokens. query: [head_dim]; end: tokens of the sequence up to the row's own.
  void take(int row, const float* query, int end);

  // Gather from the reader's keys.
  void attend(TileReader& reader);

  // The result: [head_dim].
  void finish(int row, float* out) const;

  // What results of several ranges are merged from: value_columns weighted sums, the maximum, the sum of the weights.
  void save(int row, float* out) const;

 private:
  struct State {
    float maximum;  // of the scores, which are exponents of 2
    Floats sum;     // of the weights, in any lane
  };
  struct Keys {
    int begin, end;
  };
  struct Workspace {
    std::vector<int32_t> query;   // [kRowsAtOnce, query_words_]
    std::vector<int32_t> scores;  // [kRowsAtOnce, kGroupKeys] float32; then, in their place, weights in form of Format
    std::vector<float> gathered;  // [kRowsAtOnce, value_columns]
    std::vector<float> scaled;    // [head_dim]
  };
  static Workspace& workspace();

  // Some rows, as many as a product takes, and the keys of a group that one of them sees.
  struct RowTile {
    int row, rows;
    Keys seen;
    bool fetches;  // what follows the group, once for all tiles
  };

  Keys seen(int row, Keys group) const;
  void score(const RowTile& tile, const Group& keys);
  void soften(int row, Keys seen, int columns);
  void gather(const RowTile& tile, const Group& keys);
  float* gathered(int row) const { return work_.gathered.data() + ptrdiff_t(row) * columns_; }
  int32_t* scores(int row) const { return work_.scores.data() + ptrdiff_t(row) * kGroupKeys; }

  const int rows_, dim_, columns_, window_;
  const float factor_, softcap_;  // of queries; of scores as exponents of 2, or 0
  const int depth_;               // words of a key
  const ptrdiff_t query_words_;
  Workspace& work_;
  State states_[kRowsAtOnce];
  Keys range_[kRowsAtOnce];  // of the sequence that a row sees
};

extern template class QueryRows<Float32>;
extern template class QueryRows<Bfloat16Widened>;
#if defined(__AVX512BF16__)
extern template class QueryRows<Bfloat16Paired>;
#endif

}  // namespace paceline
