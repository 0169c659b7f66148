// Products with a weight of 8-bit integers as bitsandbytes quantizes it, and the gradient of their input.
//
// Dequantized numbers are bitsandbytes' own to the bit.
#include "kernels/weight_product.h"

namespace {

/// A matrix whose rows are integers with a scale each.
struct Weight8Bit {
  const int8_t* codes;
  const float* largest;  // the largest magnitude of each row
  int64_t row_size;
  int64_t element;

  void read(int64_t first, int64_t count, float* to) const {
    const float scale = largest[first / row_size] * static_cast<float>(1.0 / 127.0);
    const int8_t* const from = codes + first;
#pragma omp simd
    for (int64_t at = 0; at < count; ++at) to[at] = static_cast<float>(from[at]) * scale;
    round_numbers(element, count, to);
  }
};

/// Writes the product of rows [rows, inner] with the transpose of a weight [outer, inner], plus the bias if there is one.
void linear_8bit(const void* x, const int8_t* codes, const float* largest, int64_t rows, int64_t outer, int64_t inner,
                 int64_t element, int64_t parts, const void* bias, void* out) {
  const Weight8Bit weight{codes, largest, inner, element};
  run_product<Weight8Bit>({{x, element}, weight, true, {bias, element}, {out, element}, rows, inner, outer, parts});
}

/// Writes the product of gradients [rows, outer] with the weight.
void linear_8bit_backward(const void* grad, const int8_t* codes, const float* largest, int64_t rows, int64_t outer,
                          int64_t inner, int64_t element, int64_t parts, void* grad_x) {
  const Weight8Bit weight{codes, largest, inner, element};
  run_product<Weight8Bit>({{grad, element}, weight, false, {nullptr, element}, {grad_x, element}, rows, outer, inner,
                           parts});
}

ORT_ACCEL_KERNEL(linear_8bit);
ORT_ACCEL_KERNEL(linear_8bit_backward);

}  // namespace
