// The next token of a row of logits. The rules are those of sampler.py, which does the same with torch's operators;
// here nothing is sorted but the few logits at the edge of a filter, and most tokens' noise is never computed.
#pragma once

#include <cstdint>

namespace paceline {

// How a row's token is drawn. Mirrored in native_sampler.py.
struct Draw {
  int64_t top_k;  // 0: all
  float temperature;  // 0: the most likely token
  float top_p;  // 1: all
  float min_p;  // 0: all
  uint32_t first_key, second_key;  // of the row's noise: see randomness.py
};

// The token drawn from a row of logits; of equal ones, the first.
int64_t draw_token(const float* logits, int64_t vocabulary, const Draw& draw);

}  // namespace paceline
