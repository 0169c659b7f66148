// The element types of kernels. Values are loaded as float, computed as float, and rounded to the nearest even one.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"
#include "kernels/scratch.h"

namespace {

/// Says of a kernel's pointers what they point to.
enum Element : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float load(float value) { return value; }

inline float load(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

/// Multiplying by 2^112 moves the exponent, for denormal numbers as well.
inline float load(Float16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t found = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return float_of(found | static_cast<uint32_t>(value.bits & 0x8000) << 16);
}

template <typename T>
inline T store(float value);

template <>
inline float store<float>(float value) {
  return value;
}

template <>
inline BFloat16 store<BFloat16>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

/// Adding a power of two whose last digit is the last one of a half rounds numbers that become denormal.
template <>
inline Float16 store<Float16>(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t found = magnitude < 0x38800000u ? denormal : normal;
  found = magnitude >= 0x47800000u ? 0x7c00u : found;
  found = magnitude > 0x7f800000u ? 0x7e00u : found;
  return {static_cast<uint16_t>(found | (bits >> 16 & 0x8000u))};
}

template <typename T>
inline void put(T* to, float value) {
  *to = store<T>(value);
}

/// The elements that are converted to floats at a time: a multiple of every vector's length, and few enough for the cache.
constexpr int64_t TILE = 512;

template <typename T>
inline void widen(const T* __restrict values, int64_t count, float* __restrict buffer) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) buffer[at] = load(values[at]);
}

template <typename T>
inline void narrow(const float* __restrict buffer, int64_t count, T* __restrict values) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) values[at] = store<T>(buffer[at]);
}

/// Elements that a kernel reads. An operand that is left out has no base.
struct Input {
  const void* base;
  int64_t element;

  explicit operator bool() const { return base != nullptr; }

  /// Returns `count` elements as floats: those in memory, or others in a buffer.
  const float* read(int64_t first, int64_t count, float* buffer) const {
    if (element == FLOAT32) return static_cast<const float*>(base) + first;
    if (element == BFLOAT16) {
      widen(static_cast<const BFloat16*>(base) + first, count, buffer);
    } else {
      widen(static_cast<const Float16*>(base) + first, count, buffer);
    }
    return buffer;
  }
};

/// Elements that a kernel writes: floats at `place`, which `write` then rounds.
struct Output {
  void* base;
  int64_t element;

  explicit operator bool() const { return base != nullptr; }

  float* place(int64_t first, float* buffer) const {
    return element == FLOAT32 ? static_cast<float*>(base) + first : buffer;
  }

  void write(const float* placed, int64_t first, int64_t count) const {
    if (element == BFLOAT16) narrow(placed, count, static_cast<BFloat16*>(base) + first);
    if (element == FLOAT16) narrow(placed, count, static_cast<Float16*>(base) + first);
  }
};

}  // namespace
