// Products of tiles in bfloat16 by AMX, summed in single precision, of numbers that are split into several bfloat16.
//
// A number x is x1 + x2 + x3, each the bfloat16 nearest to what is left. Of the products of two such sums those of parts
// i and j with i + j <= 4 are added; the others are smaller than the rounding of a float. With two parts a number has 16
// bits, and those with i + j <= 3 are added. Infinities become NaN.
#pragma once

#include "kernels/small_gemm.h"
#include "kernels/vectors.h"

#if ISA_LEVEL == 2 && defined(__linux__) && defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 11
#define HAS_BF16_TILES

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE_DEPTH = 32;
constexpr int64_t TILE_COLUMNS = 32;  // of a step: two tiles, rows of the left side likewise
constexpr int64_t TILE_SIZE = 16 * TILE_DEPTH;
constexpr int64_t STEP_SIZE = 2 * TILE_SIZE;  // numbers of one part of TILE_COLUMNS columns in a step
constexpr int64_t STEPS_AT_ONCE = 16;  // with UNITS_AT_ONCE times TILE_COLUMNS rows: what the second cache holds
constexpr int64_t UNITS_AT_ONCE = 8;
constexpr int64_t LEAST_TILE_ROWS = 16;

/// True if the processor has tiles of bfloat16 and the system lets this process use them.
inline bool has_tiles() {
  static const bool found = [] {
    constexpr unsigned TILES_AND_BF16 = 1u << 24 | 1u << 22, CONVERTS_BF16 = 1u << 5;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES_AND_BF16) != TILES_AND_BF16) return false;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & CONVERTS_BF16)) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return found;
}

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16")

/// Makes the compiler write what it holds: it does not know what the instructions for tiles read.
inline void write_memory() { asm volatile("" ::: "memory"); }

/// Eight full tiles for this thread; at its end the thread has the ones it had.
class TileSettings {
 public:
  TileSettings() {
    _tile_storeconfig(before_);
    write_memory();
    alignas(64) uint8_t wanted[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      wanted[16 + 2 * tile] = 64;
      wanted[48 + tile] = 16;
    }
    write_memory();
    _tile_loadconfig(wanted);
  }
  ~TileSettings() {
    write_memory();
    _tile_loadconfig(before_);
  }
  TileSettings(const TileSettings&) = delete;
  TileSettings& operator=(const TileSettings&) = delete;

 private:
  alignas(64) uint8_t before_[64];
};

/// Rounds 16 numbers, and takes the rounded ones from them.
inline HalfVec next_part(Vec& rest) {
  const HalfVec part = (HalfVec)_mm512_cvtneps_pbh(rest);
  rest -= (Vec)(__builtin_convertvector(part, BitVec) << 16);
  return part;
}

/// Splits `depth` numbers of row `row` of a left side of TILE_COLUMNS rows; the others of all steps are zeros.
inline void split_row(const float* values, int64_t depth, int64_t steps, int64_t row, int parts, uint16_t* to) {
  uint16_t* target = to + row / 16 * TILE_SIZE + row % 16 * TILE_DEPTH;
  for (int64_t k = 0; k < steps * TILE_DEPTH; k += TILE_DEPTH, target += parts * STEP_SIZE) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t left = depth - k - 16 * half;
      const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1u << left) - 1) : 0;
      Vec rest = _mm512_maskz_loadu_ps(mask, values + k + 16 * half);
      for (int part = 0; part < parts; ++part) {
        const HalfVec found = next_part(rest);
        memcpy(target + part * STEP_SIZE + 16 * half, &found, sizeof found);
      }
    }
  }
}

/// Splits a step of a right side that lies in columns of TILE_DEPTH numbers.
template <int PARTS>
inline void split_columns(const float* columns, uint16_t* to) {
  for (int64_t half = 0; half < 2; ++half) {
    Vec squares[PARTS][16];
    for (int64_t column = 0; column < 16; ++column) {
      const float* const from = columns + (half * 16 + column) * TILE_DEPTH;
      Vec low = load(from), high = load(from + 16);
#pragma GCC unroll 3
      for (int part = 0; part < PARTS; ++part) {
        const HalfVec both[2] = {next_part(low), next_part(high)};
        memcpy(&squares[part][column], both, sizeof both);
      }
    }
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; ++part) {
      transpose(squares[part]);
#pragma GCC unroll 16
      for (int64_t pair = 0; pair < 16; ++pair) {
        memcpy(to + part * STEP_SIZE + half * TILE_SIZE + pair * 32, &squares[part][pair], sizeof(Vec));
      }
    }
  }
}

/// Splits a step of a right side that lies in rows of TILE_COLUMNS numbers.
template <int PARTS>
inline void split_rows(const float* rows, uint16_t* to) {
  for (int64_t pair = 0; pair < 16; ++pair) {
    for (int64_t half = 0; half < 2; ++half) {
      const float* const from = rows + 2 * pair * TILE_COLUMNS + 16 * half;
      Vec even = load(from), odd = load(from + TILE_COLUMNS);
#pragma GCC unroll 3
      for (int part = 0; part < PARTS; ++part) {
        const BitVec low = __builtin_convertvector(next_part(even), BitVec);
        const BitVec both = low | __builtin_convertvector(next_part(odd), BitVec) << 16;
        memcpy(to + part * STEP_SIZE + half * TILE_SIZE + pair * 32, &both, sizeof both);
      }
    }
  }
}

#define LOAD_LEFT(part) \
  _tile_loadd(4, a + (part) * STEP_SIZE, 64);  \
  _tile_loadd(5, a + (part) * STEP_SIZE + TILE_SIZE, 64)
#define LOAD_RIGHT(part) \
  _tile_loadd(6, b + (part) * STEP_SIZE, 64);   \
  _tile_loadd(7, b + (part) * STEP_SIZE + TILE_SIZE, 64)
#define ADD_PRODUCTS         \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7)

/// Multiplies TILE_COLUMNS rows and as many columns, split into 1 to 3 parts each.
template <int LEFT, int RIGHT>
inline void multiply_steps(const uint16_t* a, const uint16_t* b, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step, a += LEFT * STEP_SIZE, b += RIGHT * STEP_SIZE) {
    LOAD_LEFT(0);
    if constexpr (RIGHT > 2) {
      LOAD_RIGHT(2);
      ADD_PRODUCTS;
    }
    if constexpr (RIGHT > 1) {
      LOAD_RIGHT(1);
      ADD_PRODUCTS;
    }
    LOAD_RIGHT(0);
    ADD_PRODUCTS;
    if constexpr (LEFT > 2) {
      LOAD_LEFT(2);
      ADD_PRODUCTS;
    }
    if constexpr (LEFT > 1) {
      LOAD_LEFT(1);
      ADD_PRODUCTS;
    }
    if constexpr (LEFT > 1 && RIGHT > 1 && LEFT + RIGHT > 4) {
      LOAD_RIGHT(1);
      ADD_PRODUCTS;
    }
  }
}

#undef LOAD_LEFT
#undef LOAD_RIGHT
#undef ADD_PRODUCTS

/// Numbers of TILE_COLUMNS rows or columns, split into parts.
struct Split {
  const uint16_t* data;
  int parts;
};

/// Writes the product of TILE_COLUMNS rows and columns, or adds it to what is there.
inline void multiply_tiles(Split left, Split right, int64_t steps, float* to, bool adds) {
  constexpr int STRIDE = TILE_COLUMNS * 4;
  float* const lower = to + 16 * TILE_COLUMNS;
  write_memory();
  if (adds) {
    _tile_loadd(0, to, STRIDE);
    _tile_loadd(1, to + 16, STRIDE);
    _tile_loadd(2, lower, STRIDE);
    _tile_loadd(3, lower + 16, STRIDE);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  switch (left.parts * 4 + right.parts) {
    case 3 * 4 + 3: multiply_steps<3, 3>(left.data, right.data, steps); break;
    case 3 * 4 + 2: multiply_steps<3, 2>(left.data, right.data, steps); break;
    case 3 * 4 + 1: multiply_steps<3, 1>(left.data, right.data, steps); break;
    case 2 * 4 + 2: multiply_steps<2, 2>(left.data, right.data, steps); break;
    case 2 * 4 + 1: multiply_steps<2, 1>(left.data, right.data, steps); break;
    case 1 * 4 + 2: multiply_steps<1, 2>(left.data, right.data, steps); break;
    case 1 * 4 + 3: multiply_steps<1, 3>(left.data, right.data, steps); break;
    default: multiply_steps<1, 1>(left.data, right.data, steps);
  }
  _tile_stored(0, to, STRIDE);
  _tile_stored(1, to + 16, STRIDE);
  _tile_stored(2, lower, STRIDE);
  _tile_stored(3, lower + 16, STRIDE);
  write_memory();
}

#pragma GCC pop_options

}  // namespace

#endif
