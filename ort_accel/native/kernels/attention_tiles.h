// What the forward and the backward of attention share: which keys a query attends to, and tiles of scores.
#pragma once

#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "kernels/scratch.h"
#include "kernels/small_gemm.h"

namespace {

using ort_accel::Attention;
using ort_accel::AttentionSpan;
using ort_accel::HeadRows;

/// Indices from `begin` up to `end`.
struct Indices {
  int64_t begin;
  int64_t end;

  int64_t count() const { return end - begin; }
};

/// Returns where a row of a sequence begins; `rows` is one of `given`, and `row` is counted as in the span.
template <typename T>
inline T* row_of(const Attention& given, const AttentionSpan& span, const HeadRows& rows, int64_t row, int64_t head) {
  const int64_t sequence = &span - given.spans;
  return static_cast<T*>(rows.data) + sequence * rows.sequence_stride + row * rows.row_stride + head * rows.head_stride;
}

inline int64_t key_count(const AttentionSpan& span) { return span.key_end - span.key_begin; }
inline int64_t query_count(const AttentionSpan& span) { return span.query_end - span.query_begin; }

/// Returns the keys of its sequence that a query attends to, apart from the mask.
inline Indices attended(const Attention& given, const AttentionSpan& span, int64_t query) {
  const int64_t position = query + span.offset, keys = key_count(span);
  int64_t begin = 0, end = keys;
  if (given.window > 0) {
    begin = position - given.window + 1;
    end = position + given.window;
  }
  if (span.masking == ort_accel::CAUSAL) end = position + 1;
  end = most(least(end, keys), 0);
  return {least(most(begin, 0), end), end};
}

/// Returns the keys that any of these queries attends to, from a panel's edge on.
inline Indices attended_by_block(const Attention& given, const AttentionSpan& span, Indices queries) {
  const int64_t begin = attended(given, span, queries.begin).begin;
  return {begin / PANEL * PANEL, attended(given, span, queries.end - 1).end};
}

/// Scores of consecutive queries and keys. The columns up to a whole vector can be written, too.
struct ScoreTile {
  float* data;
  int64_t stride;
  Indices queries;
  Indices keys;

  int64_t width() const { return rounded_up(keys.count(), LANES); }
  float* row(int64_t query) const { return data + (query - queries.begin) * stride; }
};

inline Vec mask_numbers(const float* mask) { return load(mask); }
inline Vec mask_numbers(const BFloat16* mask) { return load(mask); }
inline float mask_number(float mask) { return mask; }
inline float mask_number(BFloat16 mask) { return load(mask); }
inline float mask_number(uint8_t mask) { return mask ? 0.0f : -INFINITY; }

inline Vec mask_numbers(const uint8_t* mask) {
  float lanes[LANES];
  for (int at = 0; at < LANES; ++at) lanes[at] = mask_number(mask[at]);
  return load(lanes);
}

template <typename T>
inline void add_mask(float* scores, const T* mask, int64_t count) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(scores + at, load(scores + at) + mask_numbers(mask + at));
  for (; at < count; ++at) scores[at] += mask_number(mask[at]);
}

inline void add_mask_row(const Attention& given, int64_t begin, float* scores, int64_t count) {
  if (given.mask_type == ort_accel::BOOL_MASK) add_mask(scores, static_cast<const uint8_t*>(given.mask) + begin, count);
  if (given.mask_type == ort_accel::FLOAT_MASK) add_mask(scores, static_cast<const float*>(given.mask) + begin, count);
  if (given.mask_type == ort_accel::BFLOAT16_MASK) {
    add_mask(scores, static_cast<const BFloat16*>(given.mask) + begin, count);
  }
}

/// Adds the mask to a row of scores. Keys that the query does not attend to get -inf, so do columns without a key.
inline void mask_row(const Attention& given, const AttentionSpan& span, int64_t head, const ScoreTile& tile,
                     int64_t query) {
  float* scores = tile.row(query);
  if (span.masking == ort_accel::MASKED) {
    const int64_t begin = span.mask_begin + head * given.mask_head_stride + query * given.mask_query_stride;
    add_mask_row(given, begin + tile.keys.begin, scores, tile.keys.count());
  }
  const Indices keys = attended(given, span, query);
  const int64_t width = tile.width(), end = most(least(keys.end - tile.keys.begin, width), 0);
  for (int64_t at = 0; at < least(keys.begin - tile.keys.begin, width); ++at) scores[at] = -INFINITY;
  for (int64_t at = end; at < width; ++at) scores[at] = -INFINITY;
}

/// The bits of dropout for a row of a tile.
struct KeptBits {
  const uint8_t* bits;
  int64_t bytes;
  int64_t begin;

  /// Returns a vector's numbers where the bits from `at` on are set, elsewhere 0.
  Vec apply(Vec value, int64_t at) const {
    const int64_t bit = begin + at, byte = bit / 8, left = bytes - byte;
    uint64_t word = 0;
    if (left >= 8) {
      memcpy(&word, bits + byte, 8);
    } else if (left > 0) {
      memcpy(&word, bits + byte, static_cast<size_t>(left));
    }
    const BitVec lane_bits = (BitVec{} + 1u) << LANE_NUMBERS;
    return ((lane_bits & static_cast<uint32_t>(word >> (bit % 8))) != 0) ? value : Vec{};
  }
};

inline KeptBits kept_row(const Attention& given, const AttentionSpan& span, int64_t head, const ScoreTile& tile,
                         int64_t query) {
  const int64_t begin = span.kept_begin + head * given.kept_head_stride + query * given.kept_query_stride;
  return {given.kept, given.kept_bytes, begin + tile.keys.begin};
}

/// Copies rows, times a factor, side by side.
template <typename T>
void copy_rows(const T* from, int64_t stride, int64_t count, int64_t dim, float factor, float* to) {
  for (int64_t at = 0; at < count; ++at) copy_row(from + at * stride, dim, factor, dim, to + at * dim);
}

/// Writes a row of numbers times a factor.
template <typename T>
void write_row(const float* from, int64_t count, float factor, T* to) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store(to + at, load(from + at) * factor);
  for (; at < count; ++at) put(to + at, from[at] * factor);
}

inline int64_t longest_keys(const Attention& given) {
  int64_t longest = 0;
  for (int64_t at = 0; at < given.sequences; ++at) longest = most(longest, key_count(given.spans[at]));
  return longest;
}

/// Runs `run(task, workspace)` for each task below `count`. A thread takes the next task when it has done one, so that
/// tasks of unequal size occupy all threads. Returns false if memory for a workspace is lacking.
template <typename Workspace, typename Run>
bool run_tasks(int64_t count, const Attention& given, const Run& run) {
  int64_t next = 0;
  bool has_failed = false;
  parallel_for(count, 1, [&](int64_t, int64_t) {
    int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    if (task >= count) return;
    Workspace workspace(given);
    if (!workspace.memory.data) __atomic_store_n(&has_failed, true, __ATOMIC_RELAXED);
    for (; task < count && workspace.memory.data; task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) {
      run(task, workspace);
    }
  });
  return !has_failed;
}

}  // namespace
