// A linear layer with the cross-entropy of its scores, which exist for some rows at a time only. The gradients are
// computed in the same pass, for a gradient of the loss of one.
#include <math.h>
#include <string.h>

#include "kernels/cross_entropy.h"
#include "kernels/elements.h"
#include "kernels/matrix.h"

namespace {

using ort_accel::CrossEntropy;
using ort_accel::Matrix;

constexpr int64_t FAILED = -1;
constexpr int64_t GRAIN_COLUMNS = 1 << 10;
constexpr int64_t GRAIN_NUMBERS = 1 << 15;
constexpr int64_t BLOCK_COLUMNS = 1 << 12;  // whose rounded products are added to a gradient at a time

template <typename T>
struct Head {
  T *hidden, *weight, *bias;  // [rows, width], [columns, width] and [columns] or null
  int64_t rows, width, columns, element;
  CrossEntropy loss;  // of the scores at hand
  T *grad_hidden, *grad_weight, *grad_bias;  // each may be null

  bool has_gradients() const { return grad_hidden || grad_weight || grad_bias; }
  Matrix matrix(T* data, int64_t count) const { return {data, count, width, width, 1}; }
};

/// The sums of the gradients of weight and bias as floats: the results themselves, or memory of their own.
struct Sums {
  float *weight, *bias;
};

inline float* sums_in(float* result, Scratch&, int64_t) { return result; }
inline float* sums_in(BFloat16* result, Scratch& memory, int64_t numbers) {
  return result ? memory.take(numbers) : nullptr;
}

inline void add_rounded(const BFloat16* products, int64_t count, bool is_first, float* sums) {
  parallel_for(count, GRAIN_NUMBERS, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t at = begin; at < end; ++at) sums[at] = load(products[at]) + (is_first ? 0.0f : sums[at]);
  });
}

/// Adds the products of scores' gradients with hidden rows to the gradient of the weight.
inline bool add_to_weight(const Head<float>& head, const Matrix& hidden, const Matrix& scores, bool is_first,
                          float* sums, Scratch&) {
  const Matrix out = head.matrix(sums, head.columns);
  return ort_accel::multiply_matrices(scores.transposed(), hidden, is_first ? nullptr : &out, out, head.element);
}

inline bool add_to_weight(const Head<BFloat16>& head, const Matrix& hidden, const Matrix& scores, bool is_first,
                          float* sums, Scratch& memory) {
  BFloat16* const products = reinterpret_cast<BFloat16*>(memory.data + memory.used);
  for (int64_t first = 0; first < head.columns; first += BLOCK_COLUMNS) {
    const int64_t count = head.columns - first < BLOCK_COLUMNS ? head.columns - first : BLOCK_COLUMNS;
    Matrix block = scores.transposed();
    block.data = static_cast<BFloat16*>(scores.data) + first;
    block.rows = count;
    if (!ort_accel::multiply_matrices(block, hidden, nullptr, head.matrix(products, count), head.element)) return false;
    add_rounded(products, count * head.width, is_first, sums + first * head.width);
  }
  return true;
}

template <typename T>
void add_to_bias(const T* grads, int64_t rows, int64_t columns, bool is_first, float* sums) {
  parallel_for(columns, GRAIN_COLUMNS, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* const line = grads + row * columns;
      const bool is_new = is_first && row == 0;
#pragma omp simd
      for (int64_t at = begin; at < end; ++at) sums[at] = load(line[at]) + (is_new ? 0.0f : sums[at]);
    }
  });
}

inline void finish(const float*, int64_t, float*) {}
inline void finish(const float* sums, int64_t count, BFloat16* result) {
  if (!result) return;
  parallel_for(count, GRAIN_NUMBERS, [&](int64_t begin, int64_t end) { narrow(sums + begin, end - begin, result + begin); });
}

/// Computes the scores of rows [first, first + count), their losses and their share of the gradients. Returns how many
/// targets are no column.
template <typename T>
int64_t run_rows(const Head<T>& head, int64_t first, int64_t count, T* scores, const Sums& sums, Scratch& memory) {
  const auto multiply = ort_accel::multiply_matrices;
  const Matrix hidden = head.matrix(head.hidden + first * head.width, count);
  const Matrix weight = head.matrix(head.weight, head.columns), out{scores, count, head.columns, head.columns, 1};
  const Matrix bias{head.bias, count, head.columns, 0, 1};
  if (!multiply(hidden, weight.transposed(), head.bias ? &bias : nullptr, out, head.element)) return FAILED;
  CrossEntropy loss = head.loss;
  loss.scores = scores;
  loss.rows = count;
  loss.targets += first;
  loss.losses += first;
  ort_accel::Value argument{};
  argument.pointer = &loss;
  const int64_t invalid = ort_accel::find_kernel("cross_entropy")(&argument);
  if (invalid) return invalid;
  if (head.grad_hidden) {
    const Matrix grad = head.matrix(head.grad_hidden + first * head.width, count);
    if (!multiply(out, weight, nullptr, grad, head.element)) return FAILED;
  }
  if (head.grad_weight && !add_to_weight(head, hidden, out, first == 0, sums.weight, memory)) return FAILED;
  if (head.grad_bias) add_to_bias(scores, count, head.columns, first == 0, sums.bias);
  return 0;
}

template <typename T>
void write_zeros(T* result, int64_t numbers) {
  if (result) memset(static_cast<void*>(result), 0, static_cast<size_t>(numbers) * sizeof(T));
}

template <typename T>
int64_t run_head(const Head<T>& head, int64_t most_rows) {
  const int64_t rows_at_once = head.rows < most_rows ? head.rows : most_rows;
  const bool is_rounded = sizeof(T) < sizeof(float);
  const int64_t block = BLOCK_COLUMNS < head.columns ? BLOCK_COLUMNS : head.columns;
  const int64_t of_weight = is_rounded && head.grad_weight ? head.columns * head.width + block * head.width / 2 : 0;
  const int64_t scores = (rows_at_once * head.columns * static_cast<int64_t>(sizeof(T)) + 3) / 4;
  Scratch memory(scores + of_weight + (is_rounded ? head.columns : 0) + 64);
  if (!memory.data) return FAILED;
  T* const at_once = reinterpret_cast<T*>(memory.take(scores));
  const Sums sums{sums_in(head.grad_weight, memory, head.columns * head.width),
                  sums_in(head.grad_bias, memory, head.columns)};
  if (!head.rows) {
    write_zeros(head.grad_weight, head.columns * head.width);
    write_zeros(head.grad_bias, head.columns);
    return 0;
  }
  for (int64_t first = 0; first < head.rows; first += rows_at_once) {
    const int64_t count = head.rows - first < rows_at_once ? head.rows - first : rows_at_once;
    if (const int64_t invalid = run_rows(head, first, count, at_once, sums, memory)) return invalid;
  }
  if (head.grad_weight) finish(sums.weight, head.columns * head.width, head.grad_weight);
  if (head.grad_bias) finish(sums.bias, head.columns, head.grad_bias);
  return 0;
}

template <typename T>
int64_t run(void* hidden, void* weight, void* bias, int64_t rows, int64_t width, int64_t columns, int64_t element,
            const CrossEntropy& loss, int64_t most_rows, void* grad_hidden, void* grad_weight, void* grad_bias) {
  Head<T> head{static_cast<T*>(hidden), static_cast<T*>(weight), static_cast<T*>(bias), rows, width, columns, element,
               loss, static_cast<T*>(grad_hidden), static_cast<T*>(grad_weight), static_cast<T*>(grad_bias)};
  head.loss.columns = head.loss.row_stride = columns;
  head.loss.is_bfloat16 = element == BFLOAT16;
  head.loss.writes_gradients = head.has_gradients();
  return run_head(head, most_rows);
}

/// Writes the sum of the losses of all rows whose target is not ignored, or their mean, and its gradients unless they
/// are null. Returns how many targets are no column, or -1 if memory is lacking.
int64_t linear_cross_entropy(void* hidden, void* weight, void* bias, const int64_t* targets, int64_t rows,
                             int64_t width, int64_t columns, int64_t element, int64_t ignored, int64_t takes_mean,
                             double smoothing, double z_loss, double soft_cap, double scale, int64_t most_rows,
                             float* result, void* grad_hidden, void* grad_weight, void* grad_bias) {
  Scratch losses(rows);
  if (!losses.data || !ort_accel::multiply_matrices) return FAILED;
  int64_t counted = 0;
  for (int64_t row = 0; row < rows; ++row) counted += targets[row] != ignored;
  CrossEntropy loss{};
  loss.targets = targets;
  loss.ignored_target = ignored;
  loss.smoothing = static_cast<float>(smoothing);
  loss.z_loss = static_cast<float>(z_loss);
  loss.soft_cap = static_cast<float>(soft_cap);
  loss.scale = static_cast<float>(scale);
  loss.grad = takes_mean ? 1.0f / static_cast<float>(counted) : 1.0f;
  loss.losses = losses.data;
  const auto run_for = element == BFLOAT16 ? run<BFloat16> : run<float>;
  const int64_t invalid = run_for(hidden, weight, bias, rows, width, columns, element, loss, most_rows, grad_hidden,
                                  grad_weight, grad_bias);
  double sum = invalid ? NAN : 0.0;
  for (int64_t row = 0; row < rows && !invalid; ++row) sum += losses.data[row];
  *result = static_cast<float>(takes_mean ? sum / static_cast<double>(counted) : sum);
  return invalid;
}

ORT_ACCEL_KERNEL(linear_cross_entropy);

}  // namespace
