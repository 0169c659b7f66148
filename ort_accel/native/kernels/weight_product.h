// Products with a weight that is stored in another form, and is read as floats in parts.
//
// Panels of the weight are read into scratch memory and multiplied with all rows. Where the processor multiplies tiles of
// bfloat16 (AMX), a float is the sum of three of them, and the six largest of the nine partial products give a product in
// single precision.
//
// A weight has a member `element`, the type that its numbers are rounded to, and `read(first, count, to)`, which writes
// `count` of its elements in one row, from the one at `first`, an even one.
#pragma once

#include "kernels/kernel.h"
#include "kernels/small_gemm.h"
#include "kernels/tiles_bf16.h"
#include "kernels/vectors.h"

namespace {

constexpr int64_t MOST_PANEL_BYTES = 16 << 20;
constexpr int64_t DEPTH_BLOCK = 256;
constexpr int64_t ROW_BLOCK = 64;

/// Rounds numbers to a type.
template <typename T>
void round_numbers(int64_t count, float* to) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) to[at] = load(store<T>(to[at]));
}

inline void round_numbers(int64_t element, int64_t count, float* to) {
  if (element == BFLOAT16) round_numbers<BFloat16>(count, to);
  if (element == FLOAT16) round_numbers<Float16>(count, to);
}

/// A product of rows [rows, depth] with the weight, transposed or not: [rows, columns].
template <typename W>
struct WeightProduct {
  Input x;
  W weight;
  bool is_transposed;
  Input bias;
  Output out;
  int64_t rows;
  int64_t depth;
  int64_t columns;
  int64_t most_parts;  // of a float in a product of tiles: 3 for all of its bits

  /// Writes elements [first, first + count) of a column of the right matrix, for `lines` columns from `column`.
  void read_columns(int64_t column, int64_t lines, float* to) const {
    for (int64_t line = 0; line < lines; ++line) weight.read((column + line) * depth, depth, to + line * depth);
  }

  /// Writes a block of results, whose rows lie `stride` apart.
  void finish(int64_t row, int64_t count, int64_t column, int64_t width, float* block, int64_t stride) const {
    float buffer[PANEL];
    const float* const added = bias ? bias.read(column, width, buffer) : nullptr;
    for (int64_t at = 0; at < count; ++at) {
      float* const from = block + at * stride;
      const int64_t first = (row + at) * columns + column;
      float* const to = out.place(first, from);
      for (int64_t lane = 0; lane < width; ++lane) to[lane] = added ? from[lane] + added[lane] : from[lane];
      out.write(to, first, width);
    }
  }
};

/// Fills a panel of columns with zeros behind the last one.
template <typename W>
void pack_panel(const WeightProduct<W>& product, int64_t first, int64_t column, const Panels& to) {
  const int64_t width = to.width(column), count = least(to.columns - column, width), depth = to.depth;
  float* const panel = to.at(column);
  if (!product.is_transposed) {
    for (int64_t row = 0; row < depth; ++row) {
      float* const line = panel + row * width;
      product.weight.read(row * product.columns + first + column, count, line);
      for (int64_t at = count; at < width; ++at) line[at] = 0;
    }
    return;
  }
  const Scratch memory(LANES * depth);
  float* const lines = memory.needed();
  for (int64_t part = 0; part < width; part += LANES) {
    const int64_t found = most(least(count - part, LANES), 0);
    product.read_columns(first + column + part, found, lines);
    if (found == LANES) {
      pack_square(lines, depth, depth, width, panel + part);
    } else {
      pack_part(lines, depth, found, depth, width, panel + part);
    }
  }
}

/// Multiplies rows [begin, end) with the columns from `first` on that are packed.
template <typename W>
void multiply_panels(const WeightProduct<W>& product, int64_t begin, int64_t end, int64_t first, const Panels& right) {
  const int64_t depth = product.depth;
  Scratch memory(ROW_BLOCK * (depth + PANEL));
  memory.needed();
  float *const widened = memory.take(ROW_BLOCK * depth), *const block = memory.take(ROW_BLOCK * PANEL);
  for (int64_t row = begin; row < end; row += ROW_BLOCK) {
    const int64_t rows = least(end - row, ROW_BLOCK);
    const float* const left = product.x.read(row * depth, rows * depth, widened);
    for (int64_t column = 0; column < right.columns; column += PANEL) {
      for (int64_t k = 0; k < depth; k += DEPTH_BLOCK) {
        multiply<false>({left + k, depth}, rows, right, column, column + 1, k, least(depth - k, DEPTH_BLOCK),
                        {block, PANEL, k > 0});
      }
      product.finish(row, rows, first + column, least(right.columns - column, PANEL), block, PANEL);
    }
  }
}

/// Multiplies with vectors of floats.
template <typename W>
void multiply_floats(const WeightProduct<W>& product) {
  const int64_t most_columns = MOST_PANEL_BYTES / (product.depth * 4) / PANEL * PANEL;
  const int64_t group = most(least(most_columns, rounded_up(product.columns, PANEL)), PANEL);
  const Scratch memory(Panels::size(group, product.depth));
  for (int64_t first = 0; first < product.columns; first += group) {
    const Panels right{memory.needed(), least(product.columns - first, group), product.depth};
    parallel_for((right.columns + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) pack_panel(product, first, panel * PANEL, right);
    });
    parallel_for(product.rows, TILE_ROWS, [&](int64_t begin, int64_t end) {
      multiply_panels(product, begin, end, first, right);
    });
  }
}

#ifdef HAS_BF16_TILES

/// Numbers of the parts of a row's and of a column's numbers, and of the steps through the depth.
struct TilePlan {
  int left_parts;
  int right_parts;
  int64_t steps;

  int64_t padded() const { return steps * TILE_DEPTH; }
  int64_t panel_size() const { return steps * right_parts * STEP_SIZE; }
};

/// Splits columns [first, first + TILE_COLUMNS) into parts.
template <int PARTS, typename W>
void pack_parts(const WeightProduct<W>& product, int64_t first, int64_t steps, float* lines, uint16_t* to) {
  const int64_t depth = product.depth, count = least(product.columns - first, TILE_COLUMNS);
  for (int64_t step = 0; step < steps; ++step, to += PARTS * STEP_SIZE) {
    const int64_t k = step * TILE_DEPTH, found = least(depth - k, TILE_DEPTH);
    memset(lines, 0, found < TILE_DEPTH || count < TILE_COLUMNS ? STEP_SIZE * sizeof(float) : 0);
    if (product.is_transposed) {
      for (int64_t at = 0; at < count; ++at) {
        product.weight.read((first + at) * depth + k, found, lines + at * TILE_DEPTH);
      }
      split_columns<PARTS>(lines, to);
    } else {
      for (int64_t at = 0; at < found; ++at) {
        product.weight.read((k + at) * product.columns + first, count, lines + at * TILE_COLUMNS);
      }
      split_rows<PARTS>(lines, to);
    }
  }
}

template <typename W>
void pack_parts(const WeightProduct<W>& product, int64_t first, const TilePlan& plan, float* lines, uint16_t* to) {
  switch (plan.right_parts) {
    case 3: return pack_parts<3>(product, first, plan.steps, lines, to);
    case 2: return pack_parts<2>(product, first, plan.steps, lines, to);
    default: return pack_parts<1>(product, first, plan.steps, lines, to);
  }
}

/// Rows of one thread's products, in units of TILE_COLUMNS: their parts for some steps, and their sums.
struct RowUnits {
  int64_t first;
  int64_t count;
  uint16_t* parts;
  float* sums;  // a block for each unit and each panel of columns: rows with a power of two between them share cache sets
};

/// Splits the numbers of all rows for steps [begin, end).
template <typename W>
void split_units(const WeightProduct<W>& product, const RowUnits& units, int left_parts, int64_t begin, int64_t end,
                 float* line) {
  const int64_t k = begin * TILE_DEPTH, count = least(end * TILE_DEPTH, product.depth) - k;
  for (int64_t at = 0; at < units.count * TILE_COLUMNS; ++at) {
    const int64_t row = units.first * TILE_COLUMNS + at;
    uint16_t* const to = units.parts + at / TILE_COLUMNS * ((end - begin) * left_parts * STEP_SIZE);
    const bool exists = row < product.rows;
    const float* const values = exists ? product.x.read(row * product.depth + k, count, line) : line;
    split_row(values, exists ? count : 0, end - begin, at % TILE_COLUMNS, left_parts, to);
  }
}

/// Multiplies rows with the columns from `first` to `last`, which are packed.
template <typename W>
void multiply_units(const WeightProduct<W>& product, const RowUnits& units, int64_t first, int64_t last,
                    const uint16_t* right, const TilePlan& plan, float* line) {
  for (int64_t begin = 0; begin < plan.steps; begin += STEPS_AT_ONCE) {
    const int64_t end = least(begin + STEPS_AT_ONCE, plan.steps), left_size = (end - begin) * plan.left_parts * STEP_SIZE;
    split_units(product, units, plan.left_parts, begin, end, line);
    for (int64_t column = 0; column < last - first; column += TILE_COLUMNS) {
      const uint16_t* const panel =
          right + column / TILE_COLUMNS * plan.panel_size() + begin * plan.right_parts * STEP_SIZE;
      for (int64_t at = 0; at < units.count; ++at) {
        float* const sums = units.sums + (column * UNITS_AT_ONCE + at * TILE_COLUMNS) * TILE_COLUMNS;
        multiply_tiles({units.parts + at * left_size, plan.left_parts}, {panel, plan.right_parts}, end - begin, sums,
                       begin > 0);
        if (end < plan.steps) continue;
        const int64_t row = (units.first + at) * TILE_COLUMNS;
        product.finish(row, least(product.rows - row, TILE_COLUMNS), first + column,
                       least(last - first - column, TILE_COLUMNS), sums, TILE_COLUMNS);
      }
    }
  }
}

/// Multiplies units [begin, end) of rows on one thread.
template <typename W>
void multiply_parts(const WeightProduct<W>& product, int64_t begin, int64_t end, int64_t first, int64_t last,
                    const uint16_t* right, const TilePlan& plan) {
  const int64_t sums_size = UNITS_AT_ONCE * TILE_COLUMNS * rounded_up(last - first, TILE_COLUMNS);
  const int64_t line_size = STEPS_AT_ONCE * TILE_DEPTH;
  const int64_t parts_size = UNITS_AT_ONCE * STEPS_AT_ONCE * plan.left_parts * STEP_SIZE;
  Scratch memory(parts_size / 2 + sums_size + line_size);
  memory.needed();
  RowUnits units{begin, 0, reinterpret_cast<uint16_t*>(memory.take(parts_size / 2)), memory.take(sums_size)};
  float* const line = memory.take(line_size);
  const TileSettings settings;
  for (; units.first < end; units.first += UNITS_AT_ONCE) {
    units.count = least(end - units.first, UNITS_AT_ONCE);
    multiply_units(product, units, first, last, right, plan, line);
  }
}

/// Multiplies with tiles.
template <typename W>
void multiply_in_tiles(const WeightProduct<W>& product) {
  const int most_parts = static_cast<int>(product.most_parts), of_half = most_parts < 2 ? 1 : 2;
  const int of_weight = product.weight.element == FLOAT32 ? most_parts : product.weight.element == FLOAT16 ? of_half : 1;
  const int of_row = product.x.element == FLOAT32 ? most_parts : 1;
  const TilePlan plan{of_row, of_weight, (product.depth + TILE_DEPTH - 1) / TILE_DEPTH};
  const int64_t panels = (product.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, panel_size = plan.panel_size();
  const int64_t group = most(least(MOST_PANEL_BYTES / (panel_size * 2), panels), 1);
  const Scratch memory(group * panel_size / 2);
  uint16_t* const right = reinterpret_cast<uint16_t*>(memory.needed());
  for (int64_t first = 0; first < panels; first += group) {
    const int64_t found = least(panels - first, group);
    parallel_for(found, 1, [&](int64_t begin, int64_t end) {
      float lines[STEP_SIZE];
      for (int64_t panel = begin; panel < end; ++panel) {
        pack_parts(product, (first + panel) * TILE_COLUMNS, plan, lines, right + panel * panel_size);
      }
    });
    const int64_t last = least((first + found) * TILE_COLUMNS, product.columns);
    parallel_for((product.rows + TILE_COLUMNS - 1) / TILE_COLUMNS, 1, [&](int64_t begin, int64_t end) {
      multiply_parts(product, begin, end, first * TILE_COLUMNS, last, right, plan);
    });
  }
}

#endif

template <typename W>
void run_product(const WeightProduct<W>& product) {
  if (!product.rows || !product.columns) return;
#ifdef HAS_BF16_TILES
  if (product.rows >= LEAST_TILE_ROWS && has_tiles()) return multiply_in_tiles(product);
#endif
  multiply_floats(product);
}

}  // namespace
