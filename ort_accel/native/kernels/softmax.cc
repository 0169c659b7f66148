// Softmax over the last dimension, with a scale and an additive mask, forward and backward.
#include "kernels/math.h"
#include "kernels/row_sums.h"

namespace {

constexpr int64_t GRAIN = 1 << 14;

inline int64_t rows_at_least(int64_t columns) { return columns < GRAIN ? GRAIN / (columns > 0 ? columns : 1) : 1; }

/// The mask of scores of shape (batch, heads, queries, columns). A stride of 0 repeats a row of the mask.
struct Mask {
  Input rows;
  int64_t heads, queries, batch_stride, head_stride, query_stride;

  int64_t first(int64_t row) const {
    const int64_t query = row % queries, head = row / queries % heads, batch = row / queries / heads;
    return batch * batch_stride + head * head_stride + query * query_stride;
  }
};

void scale_row(const float* x, float scale, int64_t columns, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < columns; ++at) out[at] = x[at] * scale;
}

void scale_and_mask_row(const float* x, float scale, const float* mask, int64_t columns, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < columns; ++at) out[at] = x[at] * scale + mask[at];
}

float maximum_of(const float* x, int64_t columns) {
  float most = -__builtin_inff();
#pragma omp simd reduction(max : most)
  for (int64_t at = 0; at < columns; ++at) most = most < x[at] ? x[at] : most;
  return most;
}

/// A NaN anywhere makes the whole row NaN.
void softmax_row(const float* x, int64_t columns, float* out) {
  const float most = maximum_of(x, columns);
  const float sum = sum_of(columns, [=](int64_t at) { return out[at] = exp_of(x[at] - most); });
  scale_row(out, 1.0f / sum, columns, out);
}

/// Computes `softmax(x * scale + mask)` for each row of scores. The mask may be null.
void softmax(const void* x, const void* mask, int64_t batch, int64_t heads, int64_t queries, int64_t columns,
             int64_t batch_stride, int64_t head_stride, int64_t query_stride, double scale, int64_t element, void* out) {
  const Input input{x, element};
  const Output output{out, element};
  const Mask masks{{mask, element}, heads, queries, batch_stride, head_stride, query_stride};
  const float factor = static_cast<float>(scale);
  parallel_for(batch * heads * queries, rows_at_least(columns), [&](int64_t begin, int64_t end) {
    const Scratch memory(2 * columns);
    float* const buffer = memory.needed();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row * columns;
      const float* scores = input.read(first, columns, buffer);
      float* const placed = output.place(first, buffer);
      if (masks.rows) {
        const float* const added = masks.rows.read(masks.first(row), columns, buffer + columns);
        scale_and_mask_row(scores, factor, added, columns, placed);
        scores = placed;
      } else if (factor != 1.0f) {
        scale_row(scores, factor, columns, placed);
        scores = placed;
      }
      softmax_row(scores, columns, placed);
      output.write(placed, first, columns);
    }
  });
}

/// Computes the gradient of `x` from the softmax's result: `scale * result * (grad - sum(grad * result))`.
void softmax_backward(const void* grad, const void* result, int64_t rows, int64_t columns, double scale,
                      int64_t element, void* grad_x) {
  const Input given{grad, element}, results{result, element};
  const Output output{grad_x, element};
  const float factor = static_cast<float>(scale);
  parallel_for(rows, rows_at_least(columns), [&](int64_t begin, int64_t end) {
    const Scratch memory(2 * columns);
    float* const buffer = memory.needed();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row * columns;
      const float* const grads = given.read(first, columns, buffer);
      const float* const y = results.read(first, columns, buffer + columns);
      const float sum = sum_of(columns, [=](int64_t at) { return grads[at] * y[at]; });
      float* const placed = output.place(first, buffer);
#pragma omp simd
      for (int64_t at = 0; at < columns; ++at) placed[at] = (grads[at] - sum) * y[at] * factor;
      output.write(placed, first, columns);
    }
  });
}

ORT_ACCEL_KERNEL(softmax);
ORT_ACCEL_KERNEL(softmax_backward);

}  // namespace
