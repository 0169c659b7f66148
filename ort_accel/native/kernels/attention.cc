// Attention over sequences, in tiles: no row of scores is ever kept, only the logarithm of its sum.
#include "kernels/attention_tiles.h"

namespace {

constexpr int64_t QUERY_BLOCK = ISA_LEVEL == 2 ? 32 : 36;
constexpr int64_t KEY_BLOCK = 256;
constexpr int64_t TASK_QUERIES = 8 * QUERY_BLOCK;

/// The memory of a thread, and the keys and values that it has packed.
struct ForwardSpace {
  explicit ForwardSpace(const Attention& given)
      : ForwardSpace(given, longest_keys(given), rounded_up(given.value_dim, PANEL)) {}

  ForwardSpace(const Attention& given, int64_t keys, int64_t width)
      : memory(Panels::size(keys, given.dim) + width * keys + QUERY_BLOCK * (given.dim + KEY_BLOCK + width + 2) + 16 * 7),
        keys{memory.take(Panels::size(keys, given.dim)), 0, given.dim},
        values{memory.take(width * keys), given.value_dim, 0},
        queries(memory.take(QUERY_BLOCK * given.dim)),
        scores(memory.take(QUERY_BLOCK * KEY_BLOCK)),
        out(memory.take(QUERY_BLOCK * width)),
        largest(memory.take(QUERY_BLOCK)),
        sums(memory.take(QUERY_BLOCK)),
        width(width) {}

  Scratch memory;
  Panels keys, values;
  float *queries, *scores, *out, *largest, *sums;
  int64_t width;
  const AttentionSpan* packed_span = nullptr;
  int64_t packed_head = -1;
  int64_t packed_keys = 0;
};

/// Packs the keys of a sequence as far as they are needed, and all its values, unless they are there.
template <typename T>
void pack_keys(const Attention& given, const AttentionSpan& span, int64_t key_head, int64_t end, ForwardSpace& space) {
  const int64_t count = key_count(span);
  if (space.packed_span != &span || space.packed_head != key_head) {
    space.packed_span = &span;
    space.packed_head = key_head;
    space.packed_keys = 0;
    space.keys.columns = space.values.depth = count;
    const T* values = row_of<const T>(given, span, given.value, span.key_begin, key_head);
    pack(values, given.value.row_stride, 1.0f, space.values);
  }
  end = least(rounded_up(end, PANEL), count);
  if (end <= space.packed_keys) return;
  const T* keys = row_of<const T>(given, span, given.key, span.key_begin, key_head);
  pack_transposed(keys, given.key.row_stride, space.packed_keys, end, space.keys);
  space.packed_keys = end;
}

inline float largest_score(const float* scores, int64_t width) {
  Vec largest = load(scores);
  for (int64_t at = LANES; at < width; at += LANES) largest = larger(largest, load(scores + at));
  return largest_lane(largest);
}

/// Turns scores into weights, not yet divided by their sum; returns the sum before dropout.
template <bool DROPS>
inline float weights_of(float* scores, int64_t width, float largest, KeptBits kept) {
  Vec sum{};
  for (int64_t at = 0; at < width; at += LANES) {
    const Vec weight = exponential(load(scores + at) - largest);
    sum += weight;
    store(scores + at, DROPS ? kept.apply(weight, at) : weight);
  }
  return sum_of_lanes(sum);
}

inline void scale_row(float* row, int64_t width, float factor) {
  for (int64_t at = 0; at < width; at += LANES) store(row + at, load(row + at) * factor);
}

/// Turns a row of scores into weights. What was found in earlier tiles is scaled to the new largest score.
void soften_row(const Attention& given, const AttentionSpan& span, int64_t head, const ScoreTile& tile, int64_t query,
                ForwardSpace& space) {
  const int64_t row = query - tile.queries.begin;
  mask_row(given, span, head, tile, query);
  float* scores = tile.row(query);
  const float before = space.largest[row], found = largest_score(scores, tile.width());
  const float largest = before > found ? before : found;
  const float shift = largest == -INFINITY ? 0.0f : largest;  // all keys so far are masked
  const KeptBits kept = kept_row(given, span, head, tile, query);
  const float sum = given.kept ? weights_of<true>(scores, tile.width(), shift, kept)
                               : weights_of<false>(scores, tile.width(), shift, kept);
  const float factor = before == -INFINITY ? 0.0f : expf(before - shift);
  if (before != -INFINITY && factor != 1.0f) scale_row(space.out + row * space.width, space.width, factor);
  space.sums[row] = space.sums[row] * factor + sum;
  space.largest[row] = largest;
}

template <typename T>
void write_results(const Attention& given, const AttentionSpan& span, int64_t head, Indices queries,
                   const ForwardSpace& space) {
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    const int64_t row = query - queries.begin, target = span.query_begin + query;
    const float sum = space.sums[row], factor = sum == 0.0f ? 0.0f : given.raise / sum;
    write_row(space.out + row * space.width, given.value_dim, factor, row_of<T>(given, span, given.out, target, head));
    *row_of<float>(given, span, given.logsumexp, target, head) = space.largest[row] + logf(sum);
  }
}

template <typename T>
void attend(const Attention& given, const AttentionSpan& span, int64_t head, Indices queries, ForwardSpace& space) {
  const int64_t count = queries.count();
  const Indices keys = attended_by_block(given, span, queries);
  pack_keys<T>(given, span, head / (given.heads / given.key_heads), keys.end, space);
  const T* rows = row_of<const T>(given, span, given.query, span.query_begin + queries.begin, head);
  copy_rows(rows, given.query.row_stride, count, given.dim, given.scale, space.queries);
  for (int64_t row = 0; row < count; ++row) {
    space.largest[row] = -INFINITY;
    space.sums[row] = 0;
  }
  if (!keys.count()) memset(space.out, 0, static_cast<size_t>(count * space.width) * sizeof(float));
  for (int64_t begin = keys.begin; begin < keys.end; begin += KEY_BLOCK) {
    const int64_t end = least(begin + KEY_BLOCK, keys.end);
    const ScoreTile tile{space.scores, KEY_BLOCK, queries, {begin, end}};
    multiply<false>({space.queries, given.dim}, count, space.keys, begin, end, 0, given.dim,
                    {space.scores, KEY_BLOCK, false});
    for (int64_t query = queries.begin; query < queries.end; ++query) {
      soften_row(given, span, head, tile, query, space);
    }
    multiply<false>({space.scores, KEY_BLOCK}, count, space.values, 0, given.value_dim, begin, end - begin,
                    {space.out, space.width, begin > keys.begin});
  }
  write_results<T>(given, span, head, queries, space);
}

inline int64_t parts_of_queries(const AttentionSpan& span) {
  return (query_count(span) + TASK_QUERIES - 1) / TASK_QUERIES;
}

/// Runs a task: some queries of one head of one sequence. Tasks are counted by sequence, head and queries.
template <typename T>
void attend_part(const Attention& given, int64_t task, ForwardSpace& space) {
  const AttentionSpan* span = given.spans;
  while (task >= parts_of_queries(*span) * given.heads) task -= parts_of_queries(*span++) * given.heads;
  const int64_t head = task / parts_of_queries(*span), first = task % parts_of_queries(*span) * TASK_QUERIES;
  const int64_t last = least(first + TASK_QUERIES, query_count(*span));
  for (int64_t begin = first; begin < last; begin += QUERY_BLOCK) {
    attend<T>(given, *span, head, {begin, least(begin + QUERY_BLOCK, last)}, space);
  }
}

/// Computes results and the logarithms of the rows' sums. Returns 0, or 1 if memory is lacking.
int attention_forward(const Attention* given) {
  int64_t tasks = 0;
  for (int64_t at = 0; at < given->sequences; ++at) tasks += parts_of_queries(given->spans[at]) * given->heads;
  const bool is_done = run_tasks<ForwardSpace>(tasks, *given, [given](int64_t task, ForwardSpace& space) {
    given->is_bfloat16 ? attend_part<BFloat16>(*given, task, space) : attend_part<float>(*given, task, space);
  });
  return is_done ? 0 : 1;
}

ORT_ACCEL_KERNEL(attention_forward);

}  // namespace
