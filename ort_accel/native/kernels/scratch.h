// Memory that a kernel needs while it runs.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace {

constexpr int64_t CACHE_LINE = 64;

/// Memory for numbers, freed at the end of its block. `data` is null if there was none.
struct Scratch {
  explicit Scratch(int64_t numbers)
      : data(static_cast<float*>(aligned_alloc(CACHE_LINE, (numbers * 4 / CACHE_LINE + 1) * CACHE_LINE))) {}
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Returns the memory; ends the process if there was none.
  float* needed() const {
    if (!data) abort();
    return data;
  }

  /// Returns the next part, of so many numbers, rounded up to whole cache lines.
  float* take(int64_t numbers) {
    float* part = data + used;
    used += rounded(numbers);
    return part;
  }

  static int64_t rounded(int64_t numbers) { return (numbers + 15) / 16 * 16; }

  float* data;
  int64_t used = 0;
};

}  // namespace
