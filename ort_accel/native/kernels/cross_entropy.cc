// The cross-entropy of rows of scores, and the gradient, which is written over the scores.
#include "kernels/cross_entropy.h"

#include "kernels/kernel.h"
#include "kernels/scratch.h"
#include "kernels/vectors.h"

namespace {

using ort_accel::CrossEntropy;

constexpr int64_t GRAIN_NUMBERS = 1 << 15;
constexpr float LARGEST_TANH_OPERAND = 40.0f;

struct RowSums {
  float largest;
  float total;      // of the scores
  float logsumexp;
};

inline Vec hyperbolic_tangent(Vec x) {
  x = x > LARGEST_TANH_OPERAND ? all(LARGEST_TANH_OPERAND) : x;
  x = x < -LARGEST_TANH_OPERAND ? all(-LARGEST_TANH_OPERAND) : x;
  return 1.0f - 2.0f / (exponential(x + x) + 1.0f);
}

inline Vec cap(Vec score, float scale, float soft_cap) {
  score *= scale;
  return soft_cap == 0.0f ? score : hyperbolic_tangent(score / soft_cap) * soft_cap;
}

/// Loads, scales and caps scores into `work`, which may be the same memory; finds the largest and the total.
template <typename T>
RowSums prepare(const CrossEntropy& given, const T* row, float* work) {
  Vec largest = all(-INFINITY), total{};
  const int64_t whole = given.columns / LANES * LANES, rest = given.columns - whole;
  for (int64_t at = 0; at < whole; at += LANES) {
    const Vec score = cap(load(row + at), given.scale, given.soft_cap);
    store(work + at, score);
    largest = larger(score, largest);
    total += score;
  }
  float sum = sum_of_lanes(total);
  if (rest) {
    const Vec score = cap(load_part(row + whole, rest, 0.0f), given.scale, given.soft_cap);
    store_part(work + whole, score, rest);
    largest = larger(load_part(work + whole, rest, -INFINITY), largest);
    sum += sum_of_lanes(load_part(work + whole, rest, 0.0f));
  }
  return {largest_lane(largest), sum, 0};
}

inline float sum_of_exponentials(const float* work, int64_t columns, float largest) {
  Vec sum{}, other{};
  int64_t at = 0;
  for (; at + 2 * LANES <= columns; at += 2 * LANES) {
    sum += exponential(load(work + at) - largest);
    other += exponential(load(work + at + LANES) - largest);
  }
  for (; at < columns; at += LANES) {
    const int64_t count = columns - at;
    const Vec scores = count < LANES ? load_part(work + at, count, -INFINITY) : load(work + at);
    sum += exponential(scores - largest);
  }
  return sum_of_lanes(sum + other);
}

/// What the gradient of a row is computed with.
struct GradientFactors {
  float logsumexp;
  float of_weights;  // of the softmax
  float smoothed;    // what is taken from each column
  float of_cap;      // -1 / soft_cap^2, or 0
  float grad;
};

inline Vec gradient(Vec score, const GradientFactors& factors) {
  const Vec of_score = exponential(score - factors.logsumexp) * factors.of_weights - factors.smoothed;
  if (factors.of_cap == 0.0f) return of_score * factors.grad;
  return of_score * (score * score * factors.of_cap + 1.0f) * factors.grad;
}

template <typename T>
void write_gradient(const CrossEntropy& given, const float* work, int64_t target, const GradientFactors& factors,
                    T* row) {
  const float score = work[target], of_cap = factors.of_cap == 0.0f ? 1.0f : score * score * factors.of_cap + 1.0f;
  const float own = expf(score - factors.logsumexp) * factors.of_weights - factors.smoothed - (1.0f - given.smoothing);
  const int64_t whole = given.columns / LANES * LANES, rest = given.columns - whole;
  for (int64_t at = 0; at < whole; at += LANES) store(row + at, gradient(load(work + at), factors));
  if (rest) store_part(row + whole, gradient(load_part(work + whole, rest, 0.0f), factors), rest);
  put(row + target, own * of_cap * factors.grad);
}

/// The scores as computed with: in place if they are floats, otherwise in memory of their own.
inline float* work_row(float* row, Scratch&) { return row; }
inline float* work_row(BFloat16*, Scratch& memory) { return memory.data; }

template <typename T>
void write_nothing(const CrossEntropy& given, int64_t index, float loss, T* row) {
  given.losses[index] = loss;
  if (given.logsumexp) given.logsumexp[index] = loss;
  if (!given.writes_gradients) return;
  for (int64_t at = 0; at < given.columns; ++at) put(row + at, loss);
}

template <typename T>
void score_row(const CrossEntropy& given, int64_t index, T* row, float* work) {
  RowSums sums = prepare(given, row, work);
  sums.logsumexp = sums.largest + logf(sum_of_exponentials(work, given.columns, sums.largest));
  const int64_t target = given.targets[index];
  const float columns = static_cast<float>(given.columns), share = given.smoothing;
  float loss = (1.0f - share) * (sums.logsumexp - work[target]);
  if (share != 0.0f) loss += share * (sums.logsumexp - sums.total / columns);
  if (given.z_loss != 0.0f) loss += given.z_loss * sums.logsumexp * sums.logsumexp;
  given.losses[index] = loss;
  if (given.logsumexp) given.logsumexp[index] = sums.logsumexp;
  if (!given.writes_gradients) return;
  const float grad = (given.row_grads ? given.row_grads[index] : given.grad) * given.scale;
  const float of_cap = given.soft_cap == 0.0f ? 0.0f : -1.0f / (given.soft_cap * given.soft_cap);
  const float of_weights = 1.0f + 2.0f * given.z_loss * sums.logsumexp;
  write_gradient(given, work, target, {sums.logsumexp, of_weights, share / columns, of_cap, grad}, row);
}

/// Computes some rows; returns how many have a target that is no column.
template <typename T>
int64_t score_rows(const CrossEntropy& given, int64_t begin, int64_t end, Scratch& memory) {
  int64_t invalid = 0;
  for (int64_t index = begin; index < end; ++index) {
    T* row = static_cast<T*>(given.scores) + index * given.row_stride;
    const int64_t target = given.targets[index];
    const bool is_valid = target >= 0 && target < given.columns;
    if (target == given.ignored_target) {
      write_nothing(given, index, 0.0f, row);
    } else if (is_valid) {
      score_row(given, index, row, work_row(row, memory));
    } else {
      ++invalid;
      write_nothing(given, index, NAN, row);
    }
  }
  return invalid;
}

/// Computes losses, and gradients if asked. Without gradients, float scores are still scaled and capped in place.
/// Returns how many rows have a target that is no column, or -1 if memory is lacking.
int64_t cross_entropy(const CrossEntropy* given) {
  int64_t invalid = 0;
  bool has_failed = false;
  const int64_t grain = GRAIN_NUMBERS / (given->columns + 1) + 1;
  parallel_for(given->rows, grain, [&](int64_t begin, int64_t end) {
    Scratch memory(given->is_bfloat16 ? given->columns : 0);
    if (!memory.data) return __atomic_store_n(&has_failed, true, __ATOMIC_RELAXED);
    const int64_t found = given->is_bfloat16 ? score_rows<BFloat16>(*given, begin, end, memory)
                                             : score_rows<float>(*given, begin, end, memory);
    __atomic_fetch_add(&invalid, found, __ATOMIC_RELAXED);
  });
  return has_failed ? -1 : invalid;
}

ORT_ACCEL_KERNEL(cross_entropy);

}  // namespace
