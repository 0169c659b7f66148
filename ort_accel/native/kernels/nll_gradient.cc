// The gradient of logits under a cross-entropy, from their log-probabilities.
#include "kernels/math.h"

namespace {

constexpr int64_t GRAIN = 1 << 14;

/// Computes `(softmax - one_hot(target)) * share` for each row. `share` is 0 for rows whose target is ignored, and
/// otherwise the row's gradient, times the target's weight, divided by the total weight. `weights` and `total` may be
/// null; `grads` has one number for each row, or one for all.
void nll_gradient(const void* grads, int64_t grad_stride, const void* log_probs, const int64_t* targets,
                  const void* weights, const void* total, int64_t ignored, int64_t rows, int64_t columns,
                  int64_t element, void* grad_logits) {
  const Input grad{grads, element}, given{log_probs, element}, weight{weights, element}, divisor{total, element};
  const Output output{grad_logits, element};
  const auto number = [](const Input& input, int64_t at) {
    float buffer;
    return *input.read(at, 1, &buffer);
  };
  const int64_t grain = columns < GRAIN ? GRAIN / (columns > 0 ? columns : 1) : 1;
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    const Scratch memory(2 * columns);
    float* const buffer = memory.needed();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t target = targets[row], first = row * columns;
      const bool has_target = target != ignored && target >= 0 && target < columns;
      float share = 0;
      if (has_target) {
        share = number(grad, row * grad_stride);
        if (total) share /= number(divisor, 0);
        if (weights) share *= number(weight, target);
      }
      const float* const logarithms = given.read(first, columns, buffer);
      float* const placed = output.place(first, buffer + columns);
#pragma omp simd
      for (int64_t at = 0; at < columns; ++at) placed[at] = exp_of(logarithms[at]) * share;
      if (has_target) placed[target] -= share;
      output.write(placed, first, columns);
    }
  });
}

ORT_ACCEL_KERNEL(nll_gradient);

}  // namespace
