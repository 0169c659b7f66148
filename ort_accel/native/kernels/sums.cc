// Sums of two tensors, and of a tensor and a number.
#include "kernels/elements.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;

void add_part(const float* x, const float* y, float alpha, int64_t count, float* out) {
  if (y) {
#pragma omp simd
    for (int64_t at = 0; at < count; ++at) out[at] = x[at] + alpha * y[at];
  } else {
#pragma omp simd
    for (int64_t at = 0; at < count; ++at) out[at] = x[at] + alpha;
  }
}

/// Computes `x + alpha * y`; without `y`, `x + alpha`.
void add(const void* x, const void* y, double alpha, int64_t count, int64_t element, void* out) {
  const Input first{x, element}, second{y, element};
  const Output output{out, element};
  const float factor = static_cast<float>(alpha);
  parallel_for((count + TILE - 1) / TILE, GRAIN / TILE, [=](int64_t begin, int64_t end) {
    float buffer[TILE], other[TILE];
    for (int64_t at = begin * TILE; at < end * TILE && at < count; at += TILE) {
      const int64_t taken = count - at < TILE ? count - at : TILE;
      const float* const added = second ? second.read(at, taken, other) : nullptr;
      float* const sums = output.place(at, buffer);
      add_part(first.read(at, taken, buffer), added, factor, taken, sums);
      output.write(sums, at, taken);
    }
  });
}

ORT_ACCEL_KERNEL(add);

}  // namespace
