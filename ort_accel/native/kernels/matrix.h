// Products of matrices by PyTorch, for kernels that multiply large ones.
#pragma once

#include <cstdint>

namespace ort_accel {

/// A matrix in memory. Strides count elements.
struct Matrix {
  void* data;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;

  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
};

/// Writes `left * right` to `out`, plus `added` unless that is null; all elements have one type (elements.h). Returns
/// false if that failed; set when torch is found, and null before.
extern bool (*multiply_matrices)(const Matrix& left, const Matrix& right, const Matrix* added, const Matrix& out,
                                 int64_t element);

}  // namespace ort_accel
