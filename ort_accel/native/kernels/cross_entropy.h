// The arguments of the cross-entropy kernel.
#pragma once

#include <cstdint>

namespace ort_accel {

/// Rows of scores and their targets. Scores are multiplied by `scale`, then capped: `soft_cap * tanh(score / soft_cap)`.
struct CrossEntropy {
  void* scores;  // float or bfloat16; overwritten if gradients are written
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t is_bfloat16;
  const int64_t* targets;
  int64_t ignored_target;  // rows with this target have no loss, and a gradient of zeros
  float smoothing;         // the share of the target that all columns get in equal parts
  float z_loss;            // the factor of the squared logarithm of the sum, which is added to the loss
  float soft_cap;          // 0 for none
  float scale;

  int64_t writes_gradients;
  float grad;              // the gradient of each loss, unless `row_grads` are given
  const float* row_grads;  // the gradient of each row's loss, or null
  float* losses;
  float* logsumexp;  // or null
};

}  // namespace ort_accel
