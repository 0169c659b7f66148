// The rotary embedding of queries or keys, and its gradient.
#include "kernels/kernel.h"
#include "kernels/vectors.h"

namespace {

constexpr int64_t GRAIN_NUMBERS = 1 << 14;

/// Rotates pairs that lie half a row apart. The gradient takes the sine of the number that each product went to.
template <bool BACKWARD>
inline void rotate(const float* from, const float* cosines, const float* sines, int64_t half, float* to) {
  const float *first = BACKWARD ? sines + half : sines, *second = BACKWARD ? sines : sines + half;
  const float sign = BACKWARD ? -1.0f : 1.0f;
  int64_t at = 0;
  for (; at + LANES <= half; at += LANES) {
    const Vec low = load(from + at), high = load(from + half + at);
    store(to + at, low * load(cosines + at) - sign * high * load(first + at));
    store(to + half + at, high * load(cosines + half + at) + sign * low * load(second + at));
  }
  for (; at < half; ++at) {
    const float low = from[at], high = from[half + at];
    to[at] = low * cosines[at] - sign * high * first[at];
    to[half + at] = high * cosines[half + at] + sign * low * second[at];
  }
}

/// Computes `x * cosines + rotate_half(x) * sines`, or the gradient of x from that of the result, for rows of `dim`
/// numbers. The result's rows follow each other in three dimensions. Rows of x, and those of both tables, begin at
/// multiples of three strides.
void rotary(const float* x, const float* cosines, const float* sines, int64_t outer, int64_t middle, int64_t inner,
            int64_t dim, int64_t outer_stride, int64_t middle_stride, int64_t inner_stride, int64_t outer_in_tables,
            int64_t middle_in_tables, int64_t inner_in_tables, int64_t is_backward, float* out) {
  const auto rotate_row = is_backward ? rotate<true> : rotate<false>;
  parallel_for(outer * middle * inner, GRAIN_NUMBERS / (dim + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row / inner / middle, j = row / inner % middle, k = row % inner;
      const int64_t in_tables = i * outer_in_tables + j * middle_in_tables + k * inner_in_tables;
      const float* const from = x + i * outer_stride + j * middle_stride + k * inner_stride;
      rotate_row(from, cosines + in_tables, sines + in_tables, dim / 2, out + row * dim);
    }
  });
}

ORT_ACCEL_KERNEL(rotary);

}  // namespace
