// Products of matrices that fit the cache: the left one in rows, the right one packed into panels of columns.
//
// A panel has PANEL columns, the last one only LANES where that is enough; missing columns are zeros.
#pragma once

#include "kernels/vectors.h"

namespace {

constexpr int64_t PANEL = 2 * LANES;
constexpr int64_t TILE_ROWS = ISA_LEVEL == 2 ? 8 : 6;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

/// The right matrix: `columns` as packed, `depth` rows.
struct Panels {
  float* data;
  int64_t columns;
  int64_t depth;

  int64_t width(int64_t column) const { return columns - column > LANES ? PANEL : LANES; }
  float* at(int64_t column) const { return data + column * depth; }
  static int64_t size(int64_t columns, int64_t depth) { return rounded_up(columns, PANEL) * depth; }
};

/// The left matrix: element (row, k) is at `data[row * stride + k]`, or if transposed at `data[k * stride + row]`.
struct Left {
  const float* data;
  int64_t stride;
};

struct Product {
  float* data;
  int64_t stride;
  bool adds;
};

template <int ROWS, int VECTORS, bool TRANSPOSED>
void multiply_tile(Left left, const float* right, int64_t depth, Product result) {
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
    for (int at = 0; at < VECTORS; ++at) {
      sums[row][at] = result.adds ? load(result.data + row * result.stride + at * LANES) : Vec{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec columns[VECTORS];
#pragma GCC unroll 2
    for (int at = 0; at < VECTORS; ++at) columns[at] = load(right + (k * VECTORS + at) * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const float factor = TRANSPOSED ? left.data[k * left.stride + row] : left.data[row * left.stride + k];
#pragma GCC unroll 2
      for (int at = 0; at < VECTORS; ++at) sums[row][at] += factor * columns[at];
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
    for (int at = 0; at < VECTORS; ++at) store(result.data + row * result.stride + at * LANES, sums[row][at]);
  }
}

template <int ROWS, bool TRANSPOSED>
void multiply_rows(int64_t rows, bool is_wide, Left left, const float* right, int64_t depth, Product result) {
  if constexpr (ROWS > 0) {
    if (rows < ROWS) return multiply_rows<ROWS - 1, TRANSPOSED>(rows, is_wide, left, right, depth, result);
    if (is_wide) return multiply_tile<ROWS, 2, TRANSPOSED>(left, right, depth, result);
    multiply_tile<ROWS, 1, TRANSPOSED>(left, right, depth, result);
  }
}

/// Computes `rows` x columns [begin, end) of the product with rows [first, first + depth) of the right matrix.
/// `begin` is a multiple of PANEL, and whole panels are written. Column `begin` is the first of the result.
template <bool TRANSPOSED>
void multiply(Left left, int64_t rows, const Panels& right, int64_t begin, int64_t end, int64_t first, int64_t depth,
              Product result) {
  for (int64_t column = begin; column < end; column += PANEL) {
    const int64_t width = right.width(column);
    const float* panel = right.at(column) + first * width;
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
      const Left part{left.data + row * (TRANSPOSED ? 1 : left.stride), left.stride};
      const Product target{result.data + row * result.stride + column - begin, result.stride, result.adds};
      multiply_rows<TILE_ROWS, TRANSPOSED>(least(rows - row, TILE_ROWS), width == PANEL, part, panel, depth, target);
    }
  }
}

/// Copies a row of numbers times a factor, and zeros up to `width`.
template <typename T>
inline void copy_row(const T* from, int64_t count, float factor, int64_t width, float* to) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(to + at, load(from + at) * factor);
  for (; at < count; ++at) to[at] = load(from[at]) * factor;
  for (; at < width; ++at) to[at] = 0;
}

/// Packs a matrix [depth, columns] with a distance between its rows.
template <typename T>
void pack(const T* from, int64_t stride, float factor, const Panels& to) {
  for (int64_t column = 0; column < to.columns; column += PANEL) {
    const int64_t width = to.width(column), count = least(to.columns - column, width);
    float* panel = to.at(column);
    for (int64_t row = 0; row < to.depth; ++row) {
      copy_row(from + row * stride + column, count, factor, width, panel + row * width);
    }
  }
}

/// Transposes a square of vectors: exchanges lanes and rows at a distance, then at twice the distance.
template <int DISTANCE = 1>
inline void transpose(Vec (&square)[LANES]) {
  if constexpr (DISTANCE < LANES) {
    const auto is_upper = (LANE_NUMBERS & uint32_t{DISTANCE}) != 0;
    const BitVec low = is_upper ? LANE_NUMBERS + uint32_t{LANES - DISTANCE} : LANE_NUMBERS;
    const BitVec high = is_upper ? LANE_NUMBERS + uint32_t{LANES} : LANE_NUMBERS + uint32_t{DISTANCE};
#pragma GCC unroll 16
    for (int row = 0; row < LANES; ++row) {
      if (row & DISTANCE) continue;
      const Vec first = square[row], second = square[row + DISTANCE];
      square[row] = __builtin_shuffle(first, second, low);
      square[row + DISTANCE] = __builtin_shuffle(first, second, high);
    }
    transpose<DISTANCE * 2>(square);
  }
}

/// Packs LANES rows into LANES columns of a panel.
template <typename T>
void pack_square(const T* from, int64_t stride, int64_t depth, int64_t width, float* to) {
  int64_t k = 0;
  for (; k + LANES <= depth; k += LANES) {
    Vec square[LANES];
#pragma GCC unroll 16
    for (int row = 0; row < LANES; ++row) square[row] = load(from + row * stride + k);
    transpose(square);
#pragma GCC unroll 16
    for (int at = 0; at < LANES; ++at) store(to + (k + at) * width, square[at]);
  }
  for (; k < depth; ++k) {
    for (int row = 0; row < LANES; ++row) to[k * width + row] = load(from[row * stride + k]);
  }
}

/// Packs fewer rows than LANES; the other columns are zeros.
template <typename T>
void pack_part(const T* from, int64_t stride, int64_t rows, int64_t depth, int64_t width, float* to) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int row = 0; row < LANES; ++row) to[k * width + row] = row < rows ? load(from[row * stride + k]) : 0.0f;
  }
}

/// Packs columns [begin, end) of the transpose of a matrix [columns, depth]; `begin` is a multiple of PANEL.
template <typename T>
void pack_transposed(const T* from, int64_t stride, int64_t begin, int64_t end, const Panels& to) {
  for (int64_t column = begin; column < end; column += PANEL) {
    const int64_t width = to.width(column);
    for (int64_t part = 0; part < width; part += LANES) {
      const int64_t first = column + part, rows = to.columns - first;
      float* target = to.at(column) + part;
      if (rows >= LANES) {
        pack_square(from + first * stride, stride, to.depth, width, target);
      } else {
        pack_part(from + first * stride, stride, rows, to.depth, width, target);
      }
    }
  }
}

}  // namespace
