// Layer norm and RMS norm of rows, forward and backward.
#include <cstring>

#include "kernels/elements.h"
#include "kernels/row_sums.h"

namespace {

constexpr int64_t GRAIN = 1 << 14;
constexpr int64_t MOST_BLOCKS = 32;

inline int64_t rows_at_least(int64_t columns) { return columns < GRAIN ? GRAIN / (columns > 0 ? columns : 1) : 1; }

/// What a norm divides by and subtracts: a layer norm's statistics, or an RMS norm's, whose mean counts as 0.
struct Statistics {
  float mean;
  float rstd;
};

/// The mean is corrected by what the differences from it add up to: rows far from 0 keep their digits.
Statistics centered_statistics(const float* x, int64_t columns, float eps) {
  const float size = static_cast<float>(columns);
  const float first = sum_of(columns, [=](int64_t at) { return x[at]; }) / size;
  const Sums sums = sums_of(
      columns, [=](int64_t at) { return x[at] - first; },
      [=](int64_t at) { return (x[at] - first) * (x[at] - first); });
  const float off = sums.first / size, variance = sums.second / size - off * off;
  return {first + off, 1.0f / __builtin_sqrtf((variance < 0.0f ? 0.0f : variance) + eps)};
}

template <bool CENTERED>
Statistics statistics_of(const float* x, int64_t columns, float eps) {
  if (CENTERED) return centered_statistics(x, columns, eps);
  const float squares = sum_of(columns, [=](int64_t at) { return x[at] * x[at]; });
  return {0.0f, 1.0f / __builtin_sqrtf(squares / static_cast<float>(columns) + eps)};
}

void normalize(const float* x, Statistics row, const float* weight, const float* bias, int64_t columns, float* out) {
  const float mean = row.mean, scale = row.rstd;
  if (weight && bias) {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) out[at] = (x[at] - mean) * scale * weight[at] + bias[at];
  } else if (weight) {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) out[at] = (x[at] - mean) * scale * weight[at];
  } else {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) out[at] = (x[at] - mean) * scale + (bias ? bias[at] : 0.0f);
  }
}

/// Adds a row of the residual. What is normalized is the rounded sum, as it is written.
const float* add(const float* x, const float* residual, const Output& sum, int64_t first, int64_t columns, float* buffer) {
  float* const placed = sum.place(first, buffer);
#pragma omp simd
  for (int64_t at = 0; at < columns; ++at) placed[at] = x[at] + residual[at];
  sum.write(placed, first, columns);
  return Input{sum.base, sum.element}.read(first, columns, buffer);
}

struct Forward {
  Input x, residual, weight, bias;
  Output sum, out;
  float *mean, *rstd;
  int64_t rows, columns;
  float eps;
};

template <bool CENTERED>
void norm_rows(const Forward& norm, int64_t begin, int64_t end) {
  const int64_t columns = norm.columns;
  const Scratch memory(4 * columns);
  float* const buffer = memory.needed();
  const float* const weight = norm.weight ? norm.weight.read(0, columns, buffer + columns) : nullptr;
  const float* const bias = norm.bias ? norm.bias.read(0, columns, buffer + 2 * columns) : nullptr;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * columns;
    const float* x = norm.x.read(first, columns, buffer);
    if (norm.residual) {
      x = add(x, norm.residual.read(first, columns, buffer + 3 * columns), norm.sum, first, columns, buffer);
    }
    const Statistics found = statistics_of<CENTERED>(x, columns, norm.eps);
    if (CENTERED) norm.mean[row] = found.mean;
    norm.rstd[row] = found.rstd;
    float* const placed = norm.out.place(first, buffer);
    normalize(x, found, weight, bias, columns, placed);
    norm.out.write(placed, first, columns);
  }
}

template <bool CENTERED>
void run_forward(const Forward& norm) {
  parallel_for(norm.rows, rows_at_least(norm.columns),
               [&](int64_t begin, int64_t end) { norm_rows<CENTERED>(norm, begin, end); });
}

/// Normalizes rows of `x`, or of `x + residual`, which is written to `sum`. Mean and rstd are floats. The residual,
/// weight and bias may be null.
void layer_norm(const void* x, const void* residual, const void* weight, const void* bias, int64_t rows, int64_t columns,
                double eps, int64_t element, int64_t weight_element, void* sum, void* out, float* mean, float* rstd) {
  run_forward<true>({{x, element}, {residual, element}, {weight, weight_element}, {bias, weight_element},
                     {sum, element}, {out, element}, mean, rstd, rows, columns, static_cast<float>(eps)});
}

/// Divides rows of `x`, or of `x + residual`, by the root of their mean square.
void rms_norm(const void* x, const void* residual, const void* weight, int64_t rows, int64_t columns, double eps,
              int64_t element, int64_t weight_element, void* sum, void* out, float* rstd) {
  run_forward<false>({{x, element}, {residual, element}, {weight, weight_element}, {nullptr, weight_element},
                      {sum, element}, {out, element}, nullptr, rstd, rows, columns, static_cast<float>(eps)});
}

struct Backward {
  Input grad, x, weight, more;
  Output grad_x, grad_weight, grad_bias;
  const float *mean, *rstd;
  int64_t rows, columns;
};

/// Writes the gradient of a row. `weight` are ones where the norm has none; `more` is added where there is any.
template <bool CENTERED>
void grad_of_row(const float* grad, const float* x, const float* weight, Statistics row, const float* more,
                 int64_t columns, float* out) {
  const float mean = row.mean, scale = row.rstd, size = static_cast<float>(columns);
  const Sums sums = sums_of(
      columns, [=](int64_t at) { return grad[at] * weight[at]; },
      [=](int64_t at) { return grad[at] * weight[at] * ((x[at] - mean) * scale); });
  const float offset = CENTERED ? sums.first / size : 0.0f, slope = sums.second / size;
  if (more) {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) {
      out[at] = (grad[at] * weight[at] - offset - (x[at] - mean) * scale * slope) * scale + more[at];
    }
  } else {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) {
      out[at] = (grad[at] * weight[at] - offset - (x[at] - mean) * scale * slope) * scale;
    }
  }
}

/// Adds a row's share to the gradients of the weight and the bias.
void add_parameters(const float* grad, const float* x, Statistics row, int64_t columns, float* weight, float* bias) {
  const float mean = row.mean, scale = row.rstd;
  if (weight) {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) weight[at] += grad[at] * (x[at] - mean) * scale;
  }
  if (bias) {
#pragma omp simd
    for (int64_t at = 0; at < columns; ++at) bias[at] += grad[at];
  }
}

const float* weight_or_ones(const Input& weight, int64_t columns, float* buffer) {
  if (weight) return weight.read(0, columns, buffer);
  for (int64_t at = 0; at < columns; ++at) buffer[at] = 1.0f;
  return buffer;
}

/// Computes a block of rows. Its shares of the parameters' gradients are added to sums of its own, which begin at 0.
template <bool CENTERED>
void grad_of_rows(const Backward& norm, int64_t begin, int64_t end, float* weight_sums, float* bias_sums) {
  const int64_t columns = norm.columns;
  const Scratch memory(4 * columns);
  float* const buffer = memory.needed();
  const float* const weight = weight_or_ones(norm.weight, columns, buffer);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * columns;
    const Statistics found{CENTERED ? norm.mean[row] : 0.0f, norm.rstd[row]};
    const float* const grad = norm.grad.read(first, columns, buffer + columns);
    const float* const x = norm.x.read(first, columns, buffer + 2 * columns);
    const float* const more = norm.more ? norm.more.read(first, columns, buffer + 3 * columns) : nullptr;
    add_parameters(grad, x, found, columns, weight_sums, bias_sums);
    float* const placed = norm.grad_x.place(first, buffer + columns);
    grad_of_row<CENTERED>(grad, x, weight, found, more, columns, placed);
    norm.grad_x.write(placed, first, columns);
  }
}

/// Adds the sums of all blocks and writes them.
void reduce_blocks(const float* sums, int64_t blocks, int64_t stride, int64_t columns, const Output& out) {
  if (!out) return;
  parallel_for(columns, GRAIN, [=](int64_t begin, int64_t end) {
    float buffer[TILE];
    for (int64_t first = begin; first < end; first += TILE) {
      const int64_t count = end - first < TILE ? end - first : TILE;
      float* const placed = out.place(first, buffer);
      memset(placed, 0, static_cast<size_t>(count) * sizeof(float));
      for (int64_t block = 0; block < blocks; ++block) {
        const float* const share = sums + block * stride + first;
#pragma omp simd
        for (int64_t at = 0; at < count; ++at) placed[at] += share[at];
      }
      out.write(placed, first, count);
    }
  });
}

/// Divides the rows into blocks by their number and width alone, so that results do not depend on the threads.
template <bool CENTERED>
void run_backward(const Backward& norm) {
  const int64_t wanted = norm.rows / rows_at_least(norm.columns), columns = norm.columns;
  const int64_t blocks = wanted < 1 ? 1 : (wanted > MOST_BLOCKS ? MOST_BLOCKS : wanted);
  const Scratch memory(2 * blocks * columns);
  float* const sums = memory.needed();
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      float* const own = sums + 2 * block * columns;
      if (columns > 0) memset(own, 0, static_cast<size_t>(2 * columns) * sizeof(float));
      grad_of_rows<CENTERED>(norm, norm.rows * block / blocks, norm.rows * (block + 1) / blocks,
                             norm.grad_weight ? own : nullptr, norm.grad_bias ? own + columns : nullptr);
    }
  });
  reduce_blocks(sums, blocks, 2 * columns, columns, norm.grad_weight);
  reduce_blocks(sums + columns, blocks, 2 * columns, columns, norm.grad_bias);
}

/// Gradients of a layer norm. `more`, another gradient of the same `x`, is added to it. The weight, `more`, and the
/// gradients of weight and bias may be null.
void layer_norm_backward(const void* grad, const void* x, const void* weight, const float* mean, const float* rstd,
                         const void* more, int64_t rows, int64_t columns, int64_t element, int64_t weight_element,
                         void* grad_x, void* grad_weight, void* grad_bias) {
  run_backward<true>({{grad, element}, {x, element}, {weight, weight_element}, {more, element}, {grad_x, element},
                      {grad_weight, weight_element}, {grad_bias, weight_element}, mean, rstd, rows, columns});
}

/// Gradients of an RMS norm.
void rms_norm_backward(const void* grad, const void* x, const void* weight, const float* rstd, const void* more,
                       int64_t rows, int64_t columns, int64_t element, int64_t weight_element, void* grad_x,
                       void* grad_weight) {
  run_backward<false>({{grad, element}, {x, element}, {weight, weight_element}, {more, element}, {grad_x, element},
                       {grad_weight, weight_element}, {nullptr, weight_element}, nullptr, rstd, rows, columns});
}

ORT_ACCEL_KERNEL(layer_norm);
ORT_ACCEL_KERNEL(rms_norm);
ORT_ACCEL_KERNEL(layer_norm_backward);
ORT_ACCEL_KERNEL(rms_norm_backward);

}  // namespace
