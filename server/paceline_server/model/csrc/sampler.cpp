#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "simd.h"

namespace paceline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

// Logits by their distance from the largest: counts and masses of narrow ranges lead to the edge of a filter.
constexpr int kRanges = 1024;
constexpr float kRangesPerUnit = 32.0f;  // the last range holds all that is 32 and more below: e^-32 of the largest

uint16_t range_of(float below) {
  const float number = below * kRangesPerUnit;
  return static_cast<uint16_t>(number < float(kRanges - 1) ? number : float(kRanges - 1));
}

float weight_of(float below) { return exp2_of(-below * kLog2E); }

// What the largest logits come to, until a filter's limit is reached.
struct Kept {
  int64_t count = 0;
  double mass = 0.0;  // relative to the largest logit's
  float lowest = -kInfinity;  // keeps these and no others; of those that tie with the last one, all
};

// A row's logits, divided by the temperature, with their masses by range.
class Row {
 public:
  void read(const float* logits, int64_t size, float temperature) {
    scaled_.resize(static_cast<size_t>(size));
    float* const scaled = scaled_.data();
    float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) {
      const float value = logits[i] / temperature;
      scaled[i] = value > -kInfinity ? value : -kInfinity;  // what is not a number is not drawn
      largest = scaled[i] > largest ? scaled[i] : largest;
    }
    largest_ = largest;
  }

  const float* scaled() const { return scaled_.data(); }

  // The smallest logit that is kept; -inf where no filter is set.
  float threshold(const Draw& draw) {
    const int64_t size = static_cast<int64_t>(scaled_.size());
    const bool by_rank = draw.top_k > 0 && draw.top_k < size, by_mass = draw.top_p < 1.0f;
    float lowest = -kInfinity;
    if (by_rank || by_mass) {
      sort_into_ranges();
      const int64_t most = by_rank ? draw.top_k : size;
      const Kept ranked = walk(most, std::numeric_limits<double>::infinity());
      lowest = by_mass ? walk(most, double(draw.top_p) * ranked.mass).lowest : ranked.lowest;
    }
    return draw.min_p > 0.0f ? std::max(lowest, largest_ + std::log(draw.min_p)) : lowest;
  }

 private:
  void sort_into_ranges() {
    counts_.assign(kRanges, 0);
    masses_.assign(kRanges, 0.0);
    ranges_.resize(scaled_.size());
    weights_.resize(scaled_.size());
    const float* const scaled = scaled_.data();
    uint16_t* const ranges = ranges_.data();
    float* const weights = weights_.data();
    const size_t size = scaled_.size();
#pragma omp simd
    for (size_t i = 0; i < size; ++i) {
      ranges[i] = range_of(largest_ - scaled[i]);
      weights[i] = weight_of(largest_ - scaled[i]);
    }
    for (size_t i = 0; i < size; ++i) {
      ++counts_[ranges[i]];
      masses_[ranges[i]] += weights[i];
    }
  }

  // Go from the largest logit down, until `most` are kept or those that are have a mass of `limit`; the first is kept.
  Kept walk(int64_t most, double limit) {
    Kept kept;
    for (int range = 0; range < kRanges; ++range) {
      if (counts_[range] == 0) continue;
      if (kept.count + counts_[range] <= most && kept.mass + masses_[range] < limit) {
        kept.count += counts_[range];
        kept.mass += masses_[range];
      } else if (!walk_range(range, most, limit, kept)) {
        break;
      }
    }
    return kept;
  }

  // The same within a range. Returns whether all of it is kept.
  bool walk_range(int range, int64_t most, double limit, Kept& kept) {
    edge_.clear();
    for (size_t i = 0; i < ranges_.size(); ++i) {
      if (ranges_[i] == range) edge_.push_back(scaled_[i]);
    }
    std::sort(edge_.begin(), edge_.end(), std::greater<float>());
    for (size_t i = 0; i < edge_.size(); ++i) {
      if (kept.count > 0 && (kept.count >= most || kept.mass >= limit)) {
        kept.lowest = i > 0 ? edge_[i - 1] : std::nextafter(edge_[0], kInfinity);
        return false;
      }
      ++kept.count;
      kept.mass += weight_of(largest_ - edge_[i]);
    }
    return true;
  }

  float largest_ = -kInfinity;
  std::vector<float> scaled_, weights_, edge_;
  std::vector<uint16_t> ranges_;
  std::vector<int64_t> counts_;
  std::vector<double> masses_;
};

// noise.py: two rounds of xor-shift and multiply in words of 31 bits.
constexpr uint32_t kWord = 0x7fffffffu, kFirst = 0x7feb352du, kSecond = 0x046ca68bu;

template <class Value>
Value first_round(Value x) {
  x ^= x >> 16;
  return (x * kFirst) & kWord;
}

template <class Value>
Value second_round(Value x) {
  x ^= x >> 15;
  x = (x * kSecond) & kWord;
  return x ^ (x >> 16);
}

// The random word of a token, or of each lane's token. Odd, so that it is never 0.
template <class Value>
Value word_of(Value token, const Draw& draw) {
  const Value mixed = second_round(first_round(token));
  return second_round(first_round(mixed ^ draw.first_key) ^ draw.second_key) | 1u;
}

// Standard Gumbel noise of a word: -log(-log(1 - w)) with w in (0, 1).
float gumbel(uint32_t word) {
  const float w = static_cast<float>(word) * float((1.0 - 0x1p-24) * 0x1p-31);
  return -std::log(-std::log1p(-w));
}

// Never less than `gumbel`, by the word's exponent alone: -log(-log(1 - w)) <= -log(w).
Floats gumbel_at_most(Words words) {
  const Ints exponent = ((Ints)__builtin_convertvector((Ints)words, Floats) >> 23) - splat(127);
  return __builtin_convertvector(splat(31) - exponent, Floats) * splat(0.6931473f) + splat(1e-3f);
}

bool any(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)lanes) != 0;
#else
  int found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found |= lanes[lane];
  return found != 0;
#endif
}

// The token with the largest sum of logit and noise, of those whose logit is at least `lowest`.
class Race {
 public:
  Race(const Draw& draw, float lowest) : draw_(draw), lowest_(lowest) {}

  void enter(int64_t token, float logit) {
    if (logit < lowest_) return;
    const float sum = logit + gumbel(word_of(static_cast<uint32_t>(token), draw_));
    if (sum > best_) {
      best_ = sum;
      winner_ = token;
    }
  }

  // Enter kLanes tokens; noise is computed for those only that could win.
  void enter_all(int64_t first, const float* logits) {
    const Floats values = load(logits);
    const Words tokens = (Words)(lane_numbers() + splat(static_cast<int32_t>(first)));
    const Floats at_most = values + gumbel_at_most(word_of(tokens, draw_));
    if (!any((at_most > splat(best_)) & (values >= splat(lowest_)))) return;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (at_most[lane] > best_) enter(first + lane, values[lane]);
    }
  }

  int64_t winner() const { return winner_; }

 private:
  const Draw& draw_;
  float lowest_, best_ = -kInfinity;
  int64_t winner_ = 0;
};

int64_t most_likely(const float* logits, int64_t size) {
  Floats largest = splat(-kInfinity);
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {
    const Floats values = load(logits + at);
    largest = values > largest ? values : largest;
  }
  float highest = maximum_of(largest);
  for (; at < size; ++at) highest = std::max(highest, logits[at]);
  const int64_t found = std::find(logits, logits + size, highest) - logits;
  return found < size ? found : 0;  // not one of them is a number
}

}  // namespace

int64_t draw_token(const float* logits, int64_t vocabulary, const Draw& draw) {
  if (draw.temperature == 0.0f) return most_likely(logits, vocabulary);
  static thread_local Row row;
  row.read(logits, vocabulary, draw.temperature);
  Race race(draw, row.threshold(draw));
  int64_t token = 0;
  for (; token + kLanes <= vocabulary; token += kLanes) race.enter_all(token, row.scaled() + token);
  for (; token < vocabulary; ++token) race.enter(token, row.scaled()[token]);
  return race.winner();
}

}  // namespace paceline
