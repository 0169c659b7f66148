// Vectors as wide as the instruction set has them, and what kernels compute with them.
//
// Numbers are float, or BFloat16 in memory: loads widen them, stores round them to the nearest, to even where two are.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cstdint>

#include "kernels/elements.h"

#if ISA_LEVEL == 2
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = ISA_LEVEL == 2 ? 16 : ISA_LEVEL == 1 ? 8 : 4;
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t BitVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

#if ISA_LEVEL == 2
constexpr BitVec LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif ISA_LEVEL == 1
constexpr BitVec LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr BitVec LANE_NUMBERS = {0, 1, 2, 3};
#endif

inline Vec all(float value) { return value - Vec{}; }

inline Vec load(const float* from) {
  Vec result;
  memcpy(&result, from, sizeof result);
  return result;
}

inline Vec load(const BFloat16* from) {
  HalfVec half;
  memcpy(&half, from, sizeof half);
  return (Vec)(__builtin_convertvector(half, BitVec) << 16);
}

inline void store(float* to, Vec value) { memcpy(to, &value, sizeof value); }

inline void store(BFloat16* to, Vec value) {
  const BitVec bits = (BitVec)value;
  const BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const HalfVec half = __builtin_convertvector(value == value ? rounded : BitVec{} + 0x7fc0u, HalfVec);
  memcpy(to, &half, sizeof half);
}

/// Loads `count` numbers, fewer than a vector has; the other lanes are `rest`.
template <typename T>
inline Vec load_part(const T* from, int64_t count, float rest) {
  float lanes[LANES];
  for (int64_t at = 0; at < LANES; ++at) lanes[at] = at < count ? load(from[at]) : rest;
  return load(lanes);
}

template <typename T>
inline void store_part(T* to, Vec value, int64_t count) {
  float lanes[LANES];
  store(lanes, value);
  for (int64_t at = 0; at < count; ++at) to[at] = store<T>(lanes[at]);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

/// Combines lane i with lane i ^ DISTANCE, then with half the distance, until all lanes hold the largest.
template <int DISTANCE = LANES / 2>
inline float largest_lane(Vec value) {
  if constexpr (DISTANCE == 0) {
    return value[0];
  } else {
    return largest_lane<DISTANCE / 2>(larger(value, __builtin_shuffle(value, LANE_NUMBERS ^ uint32_t{DISTANCE})));
  }
}

template <int DISTANCE = LANES / 2>
inline float sum_of_lanes(Vec value) {
  if constexpr (DISTANCE == 0) {
    return value[0];
  } else {
    return sum_of_lanes<DISTANCE / 2>(value + __builtin_shuffle(value, LANE_NUMBERS ^ uint32_t{DISTANCE}));
  }
}

constexpr float SMALLEST_EXPONENT = -87.33654f;

/// Returns e to the power of numbers up to 88. Results below the normal numbers are 0.
inline Vec exponential(Vec x) {
  const Vec shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer, which the low bits then hold
  const Vec whole = shifted - 12582912.0f;
  const Vec part = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vec sum = part * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * part + 8.3334519073e-3f;
  sum = sum * part + 4.1665795894e-2f;
  sum = sum * part + 1.6666665459e-1f;
  sum = sum * part + 5.0000001201e-1f;
  sum = sum * (part * part) + part + 1.0f;
#if ISA_LEVEL == 2
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, all(SMALLEST_EXPONENT), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, sum, whole);
#else
  const Vec power = (Vec)(((BitVec)shifted << 23) + (127u << 23));
  return x < SMALLEST_EXPONENT ? Vec{} : sum * power;
#endif
}

}  // namespace
