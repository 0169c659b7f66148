// The rotary embedding of queries and keys, and its gradient.
#include "kernels/rotary.h"

#include "kernels/kernel.h"
#include "kernels/vectors.h"

namespace {

using ort_accel::Rotary;
using ort_accel::RotaryRows;

constexpr int64_t GRAIN_NUMBERS = 1 << 14;

/// Rotates pairs that lie half apart. The gradient takes the sine of the number that each product went to.
template <bool BACKWARD, typename T, typename U>
inline void rotate_halves(const T* from, const U* cosines, const U* sines, int64_t dim, T* to) {
  const int64_t half = dim / 2;
  const U *first = BACKWARD ? sines + half : sines, *second = BACKWARD ? sines : sines + half;
  const float sign = BACKWARD ? -1.0f : 1.0f;
  int64_t at = 0;
  for (; at + LANES <= half; at += LANES) {
    const Vec low = load(from + at), high = load(from + half + at);
    store(to + at, low * load(cosines + at) - sign * high * load(first + at));
    store(to + half + at, high * load(cosines + half + at) + sign * low * load(second + at));
  }
  for (; at < half; ++at) {
    const float low = load(from[at]), high = load(from[half + at]);
    put(to + at, low * load(cosines[at]) - sign * high * load(first[at]));
    put(to + half + at, high * load(cosines[half + at]) + sign * low * load(second[at]));
  }
}

/// Rotates pairs that lie side by side.
template <bool BACKWARD, typename T, typename U>
inline void rotate_neighbours(const T* from, const U* cosines, const U* sines, int64_t dim, T* to) {
  const float of_odd = BACKWARD ? -1.0f : 1.0f;
  const Vec signs = (LANE_NUMBERS & 1u) != 0 ? all(of_odd) : all(-of_odd);
  int64_t at = 0;
  for (; at + LANES <= dim; at += LANES) {
    const Vec value = load(from + at), sine = load(sines + at);
    const Vec swapped = __builtin_shuffle(BACKWARD ? value * sine : value, LANE_NUMBERS ^ 1u);
    store(to + at, value * load(cosines + at) + signs * (BACKWARD ? swapped : swapped * sine));
  }
  for (; at < dim; at += 2) {
    const float low = load(from[at]), high = load(from[at + 1]);
    const float of_high = load(sines[at + (BACKWARD ? 1 : 0)]), of_low = load(sines[at + (BACKWARD ? 0 : 1)]);
    const float sign = BACKWARD ? -1.0f : 1.0f;
    put(to + at, low * load(cosines[at]) - sign * high * of_high);
    put(to + at + 1, high * load(cosines[at + 1]) + sign * low * of_low);
  }
}

template <bool BACKWARD, typename T, typename U>
void rotate_position(const Rotary& given, const RotaryRows& rows, int64_t batch, int64_t position) {
  const int64_t table = batch * given.table_strides[0] + position * given.table_strides[1];
  const U *cosines = static_cast<const U*>(given.cosines) + table, *sines = static_cast<const U*>(given.sines) + table;
  const T* from = static_cast<const T*>(rows.from) + batch * rows.from_strides[0] + position * rows.from_strides[1];
  T* to = static_cast<T*>(rows.to) + batch * rows.to_strides[0] + position * rows.to_strides[1];
  const size_t rest = static_cast<size_t>(given.head_dim - given.dim) * sizeof(T);
  for (int64_t head = 0; head < rows.heads; ++head) {
    if (given.is_interleaved) {
      rotate_neighbours<BACKWARD>(from, cosines, sines, given.dim, to);
    } else {
      rotate_halves<BACKWARD>(from, cosines, sines, given.dim, to);
    }
    if (rest && to != from) memcpy(to + given.dim, from + given.dim, rest);
    from += rows.from_strides[2];
    to += rows.to_strides[2];
  }
}

template <bool BACKWARD, typename T, typename U>
void rotate_all(const Rotary& given) {
  const int64_t numbers = (given.query.heads + given.key.heads) * given.head_dim;
  parallel_for(given.batch * given.positions, GRAIN_NUMBERS / (numbers + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      rotate_position<BACKWARD, T, U>(given, given.query, at / given.positions, at % given.positions);
      rotate_position<BACKWARD, T, U>(given, given.key, at / given.positions, at % given.positions);
    }
  });
}

template <typename T, typename U>
void rotate(const Rotary& given) {
  given.is_backward ? rotate_all<true, T, U>(given) : rotate_all<false, T, U>(given);
}

/// Rotates queries and keys, or the gradients of rotated ones back.
void rotary(const Rotary* given) {
  if (given->is_bfloat16) {
    given->table_is_bfloat16 ? rotate<BFloat16, BFloat16>(*given) : rotate<BFloat16, float>(*given);
  } else {
    given->table_is_bfloat16 ? rotate<float, BFloat16>(*given) : rotate<float, float>(*given);
  }
}

ORT_ACCEL_KERNEL(rotary);

}  // namespace
