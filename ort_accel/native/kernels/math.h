// Functions of floats that the compiler turns into vector instructions: no branches, no tables, errors below 2 ulp.
#pragma once

#include "kernels/elements.h"

namespace {

/// 2^n for n from -126 to 127.
inline float power_of_two(uint32_t n) { return float_of((n + 127u) << 23); }

/// e^x as 2^n e^r with |r| at most ln(2) / 2. 2^n is multiplied in two steps, so that denormal results are exact.
inline float exp_of(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 0x1.715476p+0f + 0x1.8p23f;
  const float whole = shifted - 0x1.8p23f;
  const uint32_t n = bits_of(shifted) - bits_of(0x1.8p23f);
  float r = x - whole * 0x1.62e4p-1f;
  r = r - whole * 0x1.7f7d1cp-20f;
  float p = 0x1.6a1a6ep-10f;
  p = p * r + 0x1.123fc6p-7f;
  p = p * r + 0x1.555916p-5f;
  p = p * r + 0x1.55548ap-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = r * r * p + r + 1.0f;
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(n) >> 1);
  return p * power_of_two(half) * power_of_two(n - half);
}

inline float abs_of(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

inline float with_sign_of(float magnitude, float x) {
  return float_of(bits_of(magnitude) | (bits_of(x) & 0x80000000u));
}

/// A polynomial near 0, and elsewhere 1 - e^-q(|x|).
inline float erf_of(float x) {
  const float t = abs_of(x), s = x * x;
  float p = -0x1.3827acp-11f;
  p = p * s + 0x1.46c2c6p-8f;
  p = p * s - 0x1.b676eap-6f;
  p = p * s + 0x1.ce1908p-4f;
  p = p * s - 0x1.8126dcp-2f;
  p = p * s + 0x1.06eba6p-3f;
  const float near = p * x + x;
  const float u = t > 4.0f ? 4.0f : t;
  float q = 0x1.5d723cp-16f;
  q = q * u - 0x1.c45954p-12f;
  q = q * u + 0x1.106262p-8f;
  q = q * u - 0x1.9aebbap-6f;
  q = q * u + 0x1.bb454cp-4f;
  q = q * u + 0x1.444d1ep-1f;
  q = q * u + 0x1.212626p+0f;
  q = q * u - 0x1.62d95p-13f;
  const float far = with_sign_of(1.0f - exp_of(-q), x);
  return t > 0.92f ? far : near;
}

/// A polynomial near 0, and elsewhere 1 - 2 / (e^2|x| + 1).
inline float tanh_of(float x) {
  const float t = abs_of(x), s = x * x;
  float p = 0x1.16b09ap-9f;
  p = p * s - 0x1.0b5f64p-7f;
  p = p * s + 0x1.636deap-6f;
  p = p * s - 0x1.b9ebf6p-5f;
  p = p * s + 0x1.11105ap-3f;
  p = p * s - 0x1.555554p-2f;
  const float near = p * s * x + x;
  const float far = with_sign_of(1.0f - 2.0f / (exp_of(2.0f * t) + 1.0f), x);
  return t > 0.625f ? far : near;
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

}  // namespace
