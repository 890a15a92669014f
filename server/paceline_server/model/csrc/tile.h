// The inner loop of all matrix products here, in linear layers and in attention: a few rows of activations times two
// registers' width of columns, summed over k without leaving the registers.
#pragma once

#include "simd.h"

namespace paceline {

enum class WeightFormat : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Weights of consecutive k.
struct Run {
  const int32_t* left;   // [words, kLanes] first half of the columns
  const int32_t* right;  // [words, kLanes] second half
  int words;
  const void* ahead = nullptr;  // what will be wanted next: fetched meanwhile, ahead_step bytes a word
  ptrdiff_t ahead_step = 0;
};

// out[r][c] (+)= sum over k of a[r][k] * w[k][c], for r < rows and c < kTileColumns.
//
// All sizes and strides count words of four bytes.
struct Tile {
  const int32_t* a;    // [rows, words of all runs * Format::kActivations]
  ptrdiff_t a_stride;  // from row to row
  const Run* runs;     // one after the other
  int run_count;
  ptrdiff_t column;    // where in the runs' rows of columns the tile begins
  ptrdiff_t w_stride;  // from word to word of k
  void* out;           // [rows, kTileColumns], float or int32 as Format::Sum is
  ptrdiff_t out_stride;
  bool accumulate;     // add to what is there
};

using TileFunction = void (*)(const Tile&);

// The function for 1 <= rows <= Format::kRows.
template <class Format>
TileFunction tile_function(int rows);

extern template TileFunction tile_function<Float32>(int);
extern template TileFunction tile_function<Bfloat16Widened>(int);
extern template TileFunction tile_function<Int8>(int);
#if defined(__AVX512BF16__)
extern template TileFunction tile_function<Bfloat16Paired>(int);
#endif

// Panels of weights that few rows pass over at once: memory gives more to who reads in several places, because fetching
// ahead ends with every page, and a sum need not wait for its last product.
inline constexpr int kStreams = 4;
inline constexpr int kFewRows = 4;  // more do so much with what is read that memory is not what they wait for

// out[s][r][c] = sum over k of a[r][k] * panels[s][k][c], in the order of `Tile`: the same sums bit for bit.
struct Streams {
  const int32_t* a;  // [rows, words * Format::kActivations]
  ptrdiff_t a_stride;
  const int32_t* panels[kStreams];  // [words, kTileColumns]
  int words;
  void* out;  // [kStreams, rows, kTileColumns]
};

using StreamsFunction = void (*)(const Streams&);

// The function for 1 <= rows <= kFewRows.
template <class Format>
StreamsFunction streams_function(int rows);

extern template StreamsFunction streams_function<Float32>(int);
extern template StreamsFunction streams_function<Bfloat16Widened>(int);
extern template StreamsFunction streams_function<Int8>(int);
#if defined(__AVX512BF16__)
extern template StreamsFunction streams_function<Bfloat16Paired>(int);
#endif

// Whether a bfloat16 product is to use the processor's instruction. Measured once: where the instruction exists it is
// twice as fast as widening on some processors, and half as fast on others.
bool bfloat16_paired_is_faster();

// Multiply-adds per second of one core in products of a format that stay in its cache: what nothing here can exceed.
double product_rate(WeightFormat format);

}  // namespace paceline
