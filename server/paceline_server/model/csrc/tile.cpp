#include "tile.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>
#include <vector>

namespace paceline {
namespace {

template <class Format, int kRows>
void multiply_tile(const Tile& tile) {
  using Sum = typename Format::Sum;
  using Scalar = std::remove_cvref_t<decltype(Sum{}[0])>;
  Scalar* const out = static_cast<Scalar*>(tile.out);
  Sum left[kRows] = {}, right[kRows] = {};
  if (tile.accumulate) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      left[row] = load(out + row * tile.out_stride);
      right[row] = load(out + row * tile.out_stride + kLanes);
    }
  }
  const int32_t* a = tile.a;
  for (const Run* one = tile.runs; one < tile.runs + tile.run_count; ++one) {
    const Run& run = *one;
    const bool has_ahead = run.ahead != nullptr;  // if not, what is fetched is there
    const char* ahead = has_ahead ? static_cast<const char*>(run.ahead) + tile.column * ptrdiff_t{sizeof(int32_t)}
                                  : reinterpret_cast<const char*>(tile.a);
    const ptrdiff_t ahead_step = has_ahead ? run.ahead_step : 0;
    const int32_t* w_left = run.left + tile.column;
    const int32_t* w_right = run.right + tile.column;
    int word = 0;
    if constexpr (Format::kWordsAtOnce == 2) {
      for (; word + 2 <= run.words; word += 2) {
        __builtin_prefetch(ahead, 0, 2);
        const Ints first[2] = {load(w_left), load(w_left + tile.w_stride)};
        const Ints second[2] = {load(w_right), load(w_right + tile.w_stride)};
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
          const int32_t* activation = a + row * tile.a_stride;
          left[row] = Format::dot(left[row], activation, first);
          right[row] = Format::dot(right[row], activation, second);
        }
        a += 2 * Format::kActivations;
        w_left += 2 * tile.w_stride;
        w_right += 2 * tile.w_stride;
        ahead += 2 * ahead_step;
      }
    }
    for (; word < run.words; ++word) {
      __builtin_prefetch(ahead, 0, 2);
      const Ints first = load(w_left), second = load(w_right);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const int32_t* activation = a + row * tile.a_stride;
        left[row] = Format::dot(left[row], activation, first);
        right[row] = Format::dot(right[row], activation, second);
      }
      a += Format::kActivations;
      w_left += tile.w_stride;
      w_right += tile.w_stride;
      ahead += ahead_step;
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    store(out + row * tile.out_stride, left[row]);
    store(out + row * tile.out_stride + kLanes, right[row]);
  }
}

// Add the products of kWords words, from word `word` on.
template <class Format, int kRows, int kWords>
inline void add_words(typename Format::Sum (&sums)[kStreams][kRows][2], const Streams& streams, int word) {
  const int32_t* const a = streams.a + ptrdiff_t(word) * Format::kActivations;
#pragma GCC unroll 4
  for (int stream = 0; stream < kStreams; ++stream) {
    const int32_t* const w = streams.panels[stream] + ptrdiff_t(word) * kTileColumns;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Ints words[kWords];
      for (int index = 0; index < kWords; ++index) words[index] = load(w + index * kTileColumns + half * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        typename Format::Sum& sum = sums[stream][row][half];
        if constexpr (kWords == 1) sum = Format::dot(sum, a + row * streams.a_stride, words[0]);
        else sum = Format::dot(sum, a + row * streams.a_stride, words);
      }
    }
  }
}

template <class Format, int kRows>
void multiply_streams(const Streams& given) {
  using Sum = typename Format::Sum;
  using Scalar = std::remove_cvref_t<decltype(Sum{}[0])>;
  const Streams streams = given;  // a copy of ours: no store can change it
  Sum sums[kStreams][kRows][2] = {};
  int word = 0;
  for (; word + Format::kWordsAtOnce <= streams.words; word += Format::kWordsAtOnce) {
    add_words<Format, kRows, Format::kWordsAtOnce>(sums, streams, word);
  }
  for (; word < streams.words; ++word) add_words<Format, kRows, 1>(sums, streams, word);
  Scalar* out = static_cast<Scalar*>(streams.out);
  for (const auto& rows : sums) {
    for (const auto& row : rows) {
      store(out, row[0]);
      store(out + kLanes, row[1]);
      out += kTileColumns;
    }
  }
}

template <class Format, int... kRowsLess1>
constexpr std::array<StreamsFunction, kFewRows> streams_table(std::integer_sequence<int, kRowsLess1...>) {
  return {multiply_streams<Format, kRowsLess1 + 1>...};
}

template <class Format, int... kRowsLess1>
constexpr std::array<TileFunction, Format::kRows> table(std::integer_sequence<int, kRowsLess1...>) {
  return {multiply_tile<Format, kRowsLess1 + 1>...};
}

// Seconds for a multiply-add in a product that stays in the cache: the best of a few, since somebody else may be using
// the core.
template <class Format>
double best_time() {
  constexpr int kWords = 256, kTurns = 4;
  std::vector<int32_t> a(size_t{Format::kRows} * kWords * Format::kActivations), w(size_t{kWords} * kTileColumns);
  std::vector<int32_t> out(size_t{Format::kRows} * kTileColumns);
  const Run weights{w.data(), w.data() + kLanes, kWords};
  const Tile tile{a.data(), kWords * Format::kActivations, &weights, 1, 0, kTileColumns, out.data(), kTileColumns, false};
  const TileFunction run = tile_function<Format>(Format::kRows);
  double best = 1.0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const auto begin = std::chrono::steady_clock::now();
    for (int turn = 0; turn < kTurns; ++turn) run(tile);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best / (double{kTurns} * Format::kRows * kTileColumns * kWords * Format::kValues);
}

}  // namespace

template <class Format>
TileFunction tile_function(int rows) {
  static constexpr auto kTable = table<Format>(std::make_integer_sequence<int, Format::kRows>{});
  return kTable[static_cast<size_t>(rows - 1)];
}

template TileFunction tile_function<Float32>(int);
template TileFunction tile_function<Bfloat16Widened>(int);
template TileFunction tile_function<Int8>(int);

template <class Format>
StreamsFunction streams_function(int rows) {
  static constexpr auto kTable = streams_table<Format>(std::make_integer_sequence<int, kFewRows>{});
  return kTable[static_cast<size_t>(rows - 1)];
}

template StreamsFunction streams_function<Float32>(int);
template StreamsFunction streams_function<Bfloat16Widened>(int);
template StreamsFunction streams_function<Int8>(int);
#if defined(__AVX512BF16__)
template TileFunction tile_function<Bfloat16Paired>(int);
template StreamsFunction streams_function<Bfloat16Paired>(int);

bool bfloat16_paired_is_faster() {
  static const bool faster = best_time<Bfloat16Paired>() < best_time<Bfloat16Widened>();
  return faster;
}
#else
bool bfloat16_paired_is_faster() { return false; }
#endif

double product_rate(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32: return 1.0 / best_time<Float32>();
    case WeightFormat::kInt8: return 1.0 / best_time<Int8>();
    default:
#if defined(__AVX512BF16__)
      if (bfloat16_paired_is_faster()) return 1.0 / best_time<Bfloat16Paired>();
#endif
      return 1.0 / std::min(best_time<Bfloat16Widened>(), best_time<Float32>());
  }
}

}  // namespace paceline
