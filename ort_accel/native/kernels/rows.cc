// Rows gathered and summed by an index, and copies between layouts whose rows lie in one piece.
//
// Sums are the same for any number of threads: each thread owns columns or rows of the result, and adds in the order of
// the index.
#include "kernels/kernel.h"
#include "kernels/vectors.h"

namespace {

constexpr int64_t GRAIN_BYTES = 1 << 16;
constexpr int64_t WIDE_COLUMNS = 512;
constexpr int64_t COLUMN_BLOCK = 64;
constexpr int64_t BLOCK_BYTES = 1 << 18;

inline int64_t grain_of(int64_t row_bytes) { return GRAIN_BYTES / (row_bytes + 1) + 1; }

/// Copies row `index[i]` of `from`, which has `rows`, into row i of `to`. Returns how many numbers of the index are no
/// row; their rows are not written. Strides are in bytes.
int64_t gather_rows(const char* from, int64_t rows, int64_t from_stride, const int64_t* index, int64_t count,
                    int64_t row_bytes, char* to, int64_t to_stride) {
  int64_t invalid = 0;
  parallel_for(count, grain_of(row_bytes), [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t at = begin; at < end; ++at) {
      if (index[at] >= 0 && index[at] < rows) {
        memcpy(to + at * to_stride, from + index[at] * from_stride, static_cast<size_t>(row_bytes));
      } else {
        ++found;
      }
    }
    if (found) __atomic_fetch_add(&invalid, found, __ATOMIC_RELAXED);
  });
  return invalid;
}

template <typename T>
inline void add_row(const T* from, int64_t count, T* to) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(to + at, load(to + at) + load(from + at));
  for (; at < count; ++at) put(to + at, load(to[at]) + load(from[at]));
}

/// Rows to add: row i of `from` belongs to row `index[i]` of `to`. Strides are in numbers.
template <typename T>
struct Sums {
  const T* from;
  int64_t from_stride;
  const int64_t* index;
  int64_t count;
  int64_t skipped;  // a number of the index that is left out
  T* to;
  int64_t to_stride;
  int64_t columns;

  /// Writes the sums of rows [first_row, end_row), which lie without gaps.
  void write(int64_t first_row, int64_t end_row) const {
    const int64_t numbers = (end_row - first_row) * columns;
    memset(static_cast<void*>(to + first_row * columns), 0, static_cast<size_t>(numbers) * sizeof(T));
    add(first_row, end_row, 0, columns);
  }

  void add(int64_t first_row, int64_t end_row, int64_t first_column, int64_t end_column) const {
    for (int64_t at = 0; at < count; ++at) {
      if (index[at] < first_row || index[at] >= end_row || index[at] == skipped) continue;
      const T* row = from + at * from_stride + first_column;
      add_row(row, end_column - first_column, to + index[at] * to_stride + first_column);
    }
  }
};

inline int64_t count_invalid(const int64_t* index, int64_t count, int64_t rows) {
  int64_t invalid = 0;
  for (int64_t at = 0; at < count; ++at) invalid += index[at] < 0 || index[at] >= rows;
  return invalid;
}

template <typename T>
void add_all(const Sums<T>& sums, int64_t rows) {
  const int64_t columns = sums.columns;
  if (sums.count * columns * int64_t{sizeof(T)} <= GRAIN_BYTES) return sums.add(0, rows, 0, columns);
  if (columns < WIDE_COLUMNS) {
    return parallel_for(rows, 1, [&](int64_t begin, int64_t end) { sums.add(begin, end, 0, columns); });
  }
  parallel_for((columns + COLUMN_BLOCK - 1) / COLUMN_BLOCK, 1, [&](int64_t begin, int64_t end) {
    const int64_t last = end * COLUMN_BLOCK < columns ? end * COLUMN_BLOCK : columns;
    sums.add(0, rows, begin * COLUMN_BLOCK, last);
  });
}

/// Adds row i of `from` to row `index[i]` of `to`, which has `rows`. Returns how many numbers of the index are no row.
int64_t scatter_add_rows(const void* from, int64_t from_stride, const int64_t* index, int64_t count, int64_t columns,
                         void* to, int64_t rows, int64_t to_stride, int64_t is_bfloat16) {
  if (is_bfloat16) {
    add_all(Sums<BFloat16>{static_cast<const BFloat16*>(from), from_stride, index, count, -1,
                           static_cast<BFloat16*>(to), to_stride, columns}, rows);
  } else {
    add_all(Sums<float>{static_cast<const float*>(from), from_stride, index, count, -1, static_cast<float*>(to),
                        to_stride, columns}, rows);
  }
  return count_invalid(index, count, rows);
}

template <typename T>
void fill_and_add(const Sums<T>& sums, int64_t rows) {
  const int64_t row_bytes = sums.columns * int64_t{sizeof(T)};
  parallel_for(rows, grain_of(row_bytes), [&](int64_t begin, int64_t end) { sums.write(begin, end); });
}

/// Writes the gradient of an embedding's weight, [rows, columns], from the gradients of the rows that `index` took.
/// Rows taken by `padding_index` count as zeros; -1 if there is none. Returns how many numbers of the index are no row.
int64_t embedding_gradient(const void* grads, int64_t grad_stride, const int64_t* index, int64_t count, int64_t columns,
                           int64_t padding_index, void* weight_grad, int64_t rows, int64_t is_bfloat16) {
  if (is_bfloat16) {
    fill_and_add(Sums<BFloat16>{static_cast<const BFloat16*>(grads), grad_stride, index, count, padding_index,
                                static_cast<BFloat16*>(weight_grad), columns, columns}, rows);
  } else {
    fill_and_add(Sums<float>{static_cast<const float*>(grads), grad_stride, index, count, padding_index,
                             static_cast<float*>(weight_grad), columns, columns}, rows);
  }
  return count_invalid(index, count, rows);
}

/// Writes the sum of a matrix, times `scale` if there is one, with the gradient of an embedding's weight, block by block.
int64_t add_embedding_gradient(const float* base, const float* scale, const float* grads, const int64_t* index,
                               int64_t count, int64_t columns, int64_t padding_index, float* out, int64_t rows) {
  const float factor = scale ? *scale : 1.0f;
  const int64_t block = BLOCK_BYTES / (columns * int64_t{sizeof(float)} + 1) + 1;
  const Sums<float> sums{grads, columns, index, count, padding_index, out, columns, columns};
  parallel_for((rows + block - 1) / block, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * block; row < end * block && row < rows; row += block) {
      const int64_t last = row + block < rows ? row + block : rows;
      sums.write(row, last);
#pragma omp simd
      for (int64_t at = row * columns; at < last * columns; ++at) out[at] += base[at] * factor;
    }
  });
  return count_invalid(index, count, rows);
}

/// Copies an array of three dimensions of rows. Strides are in bytes.
void copy_layout(const char* from, const int64_t* from_strides, char* to, const int64_t* to_strides,
                 const int64_t* sizes, int64_t row_bytes) {
  const int64_t middle = sizes[1], last = sizes[2];
  parallel_for(sizes[0] * middle * last, grain_of(row_bytes), [=](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t i = at / (middle * last), j = at / last % middle, k = at % last;
      const char* source = from + i * from_strides[0] + j * from_strides[1] + k * from_strides[2];
      char* target = to + i * to_strides[0] + j * to_strides[1] + k * to_strides[2];
      memcpy(target, source, static_cast<size_t>(row_bytes));
    }
  });
}

ORT_ACCEL_KERNEL(gather_rows);
ORT_ACCEL_KERNEL(scatter_add_rows);
ORT_ACCEL_KERNEL(embedding_gradient);
ORT_ACCEL_KERNEL(add_embedding_gradient);
ORT_ACCEL_KERNEL(copy_layout);

}  // namespace
