// Vectors as wide as the processor's registers, and the dot products that every kernel here is made of.
//
// The library is compiled once for each instruction set (see native.py), so widths and features are compile-time
// facts. GCC's vector extensions give the arithmetic; intrinsics appear only where C has no word for an instruction.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace paceline {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
inline constexpr int kTileRows = 12;  // 24 sums, 2 weights and an activation in 32 registers
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
inline constexpr int kTileRows = 6;  // 12 sums, 2 weights and an activation in 16 registers
#else
inline constexpr int kLanes = 4;
inline constexpr int kTileRows = 4;
#endif

// Columns of a tile: two registers side by side.
inline constexpr int kTileColumns = 2 * kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

// The same, at any address and whatever lies there.
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t UnalignedInts __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
inline Ints load(const int32_t* from) { return *reinterpret_cast<const UnalignedInts*>(from); }
inline void store(float* to, Floats values) { *reinterpret_cast<UnalignedFloats*>(to) = values; }
inline void store(int32_t* to, Ints values) { *reinterpret_cast<UnalignedInts*>(to) = values; }

inline Floats splat(float value) { return value - Floats{}; }
inline Ints splat(int32_t value) { return value - Ints{}; }

// The larger, or smaller, of each lane; `b` where one is not a number. GCC has no expression that it makes one
// instruction of.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

inline uint16_t to_bfloat16(float value) {  // to nearest, ties to even; every NaN stays one
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

inline float from_bfloat16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

// 2^x. Written without a branch, so that loops over it become vector code. Relative error 2e-7; 0 below x = -126.
inline float exp2_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  x = x < -127.0f ? -127.0f : x;
  x = x > 127.0f ? 127.0f : x;
  const float whole = (x + kRound) - kRound;
  const float part = x - whole;  // in [-0.5, 0.5]
  float p = 1.5353362e-4f;
  p = p * part + 1.3398874e-3f;
  p = p * part + 9.6184373e-3f;
  p = p * part + 5.5503324e-2f;
  p = p * part + 2.4022648e-1f;
  p = p * part + 6.9314718e-1f;
  p = p * part + 1.0f;
  return p * std::bit_cast<float>((static_cast<int32_t>(whole) + 127) << 23);
}

// The same for each lane.
inline Floats exp2_of(Floats x) {
  const Floats round = splat(12582912.0f), low = splat(-127.0f), high = splat(127.0f);
  x = smaller(high, larger(low, x));
  const Floats whole = (x + round) - round;
  const Floats part = x - whole;
  Floats p = splat(1.5353362e-4f);
  p = p * part + splat(1.3398874e-3f);
  p = p * part + splat(9.6184373e-3f);
  p = p * part + splat(5.5503324e-2f);
  p = p * part + splat(2.4022648e-1f);
  p = p * part + splat(6.9314718e-1f);
  p = p * part + splat(1.0f);
  return p * (Floats)((__builtin_convertvector(whole, Ints) + splat(127)) << 23);
}

// tanh(x) for a number or for each lane. Eigen's rational approximation: relative error 4e-7.
template <class Value>
inline Value tanh_of(Value x) {
  const Value zero{}, low = zero - 7.90531110763549805f, high = zero + 7.90531110763549805f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Value square = x * x;
  Value p = zero - 2.76076847742355e-16f;
  p = p * square + 2.00018790482477e-13f;
  p = p * square - 8.60467152213735e-11f;
  p = p * square + 5.12229709037114e-08f;
  p = p * square + 1.48572235717979e-05f;
  p = p * square + 6.37261928875436e-04f;
  p = p * square + 4.89352455891786e-03f;
  Value q = zero + 1.19825839466702e-06f;
  q = q * square + 1.18534705686654e-04f;
  q = q * square + 2.26843463243900e-03f;
  q = q * square + 4.89352518554385e-03f;
  return x * p / q;
}

inline float sum_of(Floats x) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

inline float maximum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float highest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = x[lane] > highest ? x[lane] : highest;
  return highest;
#endif
}

inline bool any_above(Floats x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
  return maximum_of(x) > limit;
#endif
}

// 0, 1, 2, …
inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// How numbers are stored and multiplied. Weights lie in words of four bytes, each with the values of one column for
// one, two or four neighbouring k. `dot` adds the products of one word, or of kWordsAtOnce, to each lane's sum; the
// activations that go with a word take kActivations words; a tile has at most kRows rows; `pack` writes two registers of
// activations.
struct Float32 {
  static constexpr int kRows = kTileRows;
  static constexpr int kWordsAtOnce = 1;
  static constexpr int kValues = 1;
  static constexpr int kActivations = 1;
  using Sum = Floats;
  static Floats dot(Floats sum, const int32_t* a, Ints w) {
    return sum + splat(std::bit_cast<float>(a[0])) * (Floats)w;
  }
  static void pack(int32_t* to, Floats left, Floats right) {
    store(to, (Ints)left);
    store(to + kLanes, (Ints)right);
  }
};

// bfloat16 weights, activations left in float32: exact products, and on some processors faster than the instruction.
struct Bfloat16Widened {
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr int kRows = 5;  // 10 sums, 2 pairs of weights, 2 halves of them, an activation in 16 registers
#else
  static constexpr int kRows = kTileRows;
#endif
  static constexpr int kWordsAtOnce = 1;
  static constexpr int kValues = 2;
  static constexpr int kActivations = 2;
  using Sum = Floats;
  static Floats dot(Floats sum, const int32_t* a, Ints w) {
    sum += splat(std::bit_cast<float>(a[0])) * (Floats)(w << 16);
    return sum + splat(std::bit_cast<float>(a[1])) * (Floats)(w & splat(int32_t(0xffff0000)));
  }
  static void pack(int32_t* to, Floats left, Floats right) { Float32::pack(to, left, right); }
};

// bfloat16 on both sides, by the processor's instruction; sums in float32.
struct Bfloat16Paired {
  static constexpr int kValues = 2;
#if defined(__AVX512BF16__)
  static constexpr bool kAvailable = true;
  static constexpr int kRows = kTileRows;
  static constexpr int kWordsAtOnce = 1;
  static constexpr int kActivations = 1;
  using Sum = Floats;
  static Floats dot(Floats sum, const int32_t* a, Ints w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a[0]), (__m512bh)w);
  }
  static void pack(int32_t* to, Floats left, Floats right) {
    store(to, (Ints)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
  }
#else
  static constexpr bool kAvailable = false;
#endif
};

// Weights of 8 bits with a sign times activations of 8 bits without; sums in int32, exact.
struct Int8 {
  static constexpr int kValues = 4;
  static constexpr int kActivations = 1;
  // Activations are bytes up to this. Without the dot product of AVX512-VNNI the sum of two products must fit 16 bits:
  // 2 * 127 * 128 = 32512. Half their precision costs less than half the weights' would (docs/performance.md).
  // The sums of two words are added in 16 bits there too: weights are quantized so that those of one sign, among the
  // four whose products share 16 bits, add up to kLargestSum at most.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  static constexpr int kLargest = 127;
  static constexpr int kWordsAtOnce = 2;
  static constexpr int kRows = 4;  // 8 sums, 4 weights, an activation, ones and 2 products in 16 registers
#else
  static constexpr int kLargest = 255;
  static constexpr int kWordsAtOnce = 1;
  static constexpr int kRows = kTileRows;
#endif
  static constexpr int kLargestSum = 32767 / kLargest;
  using Sum = Ints;
  static Ints dot(Ints sum, const int32_t* a, Ints w) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(a[0]), (__m512i)w);
#elif defined(__AVX2__)
    // Sums of two products in 16 bits, which kLargest keeps from saturating, then sums of two of those.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(a[0]), (__m256i)w);
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int byte = 0; byte < 4; ++byte) {
      const int32_t x = static_cast<int32_t>((static_cast<uint32_t>(a[0]) >> (8 * byte)) & 255u);
      sum += x * ((w << (24 - 8 * byte)) >> 24);
    }
    return sum;
#endif
  }
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  static Ints dot(Ints sum, const int32_t* a, const Ints (&w)[2]) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(_mm256_set1_epi32(a[0]), (__m256i)w[0]),
                                           _mm256_maddubs_epi16(_mm256_set1_epi32(a[1]), (__m256i)w[1]));
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#endif
};

}  // namespace paceline
