// Sums over the numbers of a row.
#pragma once

#include <algorithm>
#include <cstdint>

namespace {

/// The numbers of a row that are added up before their sum is added to the row's: long rows lose fewer digits.
constexpr int64_t BLOCK = 1024;

struct Sums {
  float first, second;
};

/// Adds `first(i)` and `second(i)` for all i below `count`: of a block, each half in sums of its own.
template <typename First, typename Second>
inline Sums sums_of(int64_t count, First first, Second second) {
  Sums sums{};
  for (int64_t begin = 0; begin < count; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, count), half = (end - begin) / 2;
    float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t at = begin; at < begin + half; ++at) {
      a += first(at);
      b += first(at + half);
      c += second(at);
      d += second(at + half);
    }
    if ((end - begin) % 2) {
      a += first(end - 1);
      c += second(end - 1);
    }
    sums.first += a + b;
    sums.second += c + d;
  }
  return sums;
}

/// Adds `term(i)` for all i below `count`.
template <typename Term>
inline float sum_of(int64_t count, Term term) {
  return sums_of(count, term, [](int64_t) { return 0.0f; }).first;
}

}  // namespace
