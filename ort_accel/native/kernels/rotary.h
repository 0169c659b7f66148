// The arguments of the rotary embedding.
#pragma once

#include <cstdint>

namespace ort_accel {

/// Queries or keys, and where their result goes, which may be the same memory.
struct RotaryRows {
  const void* from;
  void* to;
  int64_t heads;
  int64_t from_strides[3];  // of the batch, of positions, of heads, in numbers
  int64_t to_strides[3];
};

struct Rotary {
  RotaryRows query;
  RotaryRows key;
  int64_t batch;
  int64_t positions;
  int64_t dim;       // the numbers that are rotated, an even count
  int64_t head_dim;  // those after `dim` are copied
  int64_t is_bfloat16;
  const void* cosines;  // `dim` for each position
  const void* sines;
  int64_t table_strides[2];  // of the batch, or 0, and of positions
  int64_t table_is_bfloat16;
  int64_t is_interleaved;  // a pair lies side by side, otherwise half of `dim` apart
  int64_t is_backward;
};

}  // namespace ort_accel
