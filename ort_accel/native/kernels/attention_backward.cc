// The gradients of attention over sequences, in tiles whose scores are computed again.
//
// A task is a sequence and a head of its keys, with all heads of queries that share it. Where threads are many, a task
// is a part of a sequence's queries, or a part of its keys: scores are computed twice then. No two tasks write the same
// row, and the order of sums, and so the result, is the same either way.
#include "kernels/attention_tiles.h"

namespace {

constexpr int64_t QUERY_BLOCK = ISA_LEVEL == 2 ? 64 : 60;
constexpr int64_t KEY_BLOCK = 128;
constexpr int64_t PART_KEYS = 2 * KEY_BLOCK;
constexpr int64_t PART_QUERIES = 4 * QUERY_BLOCK;
constexpr int64_t EVERYTHING = INT64_MAX;

/// A part of a sequence, and which gradients are computed for it.
struct Part {
  const AttentionSpan* span;
  int64_t key_head;
  Indices queries;
  Indices keys;
  bool has_query_grads;
  bool has_key_grads;
};

/// The memory of a thread: packed keys and values, the gradients of a sequence's keys, and what a block of queries needs.
struct BackwardSpace {
  explicit BackwardSpace(const Attention& given)
      : BackwardSpace(given, longest_keys(given), rounded_up(given.dim, PANEL), rounded_up(given.value_dim, PANEL)) {}

  BackwardSpace(const Attention& given, int64_t keys, int64_t width, int64_t value_width)
      : memory(size(given, keys, width, value_width)),
        key_columns{memory.take(Panels::size(keys, given.dim)), 0, given.dim},
        value_columns{memory.take(Panels::size(keys, given.value_dim)), 0, given.value_dim},
        key_rows{memory.take(keys * width), given.dim, 0},
        query_rows{memory.take(QUERY_BLOCK * width), given.dim, 0},
        grad_rows{memory.take(QUERY_BLOCK * value_width), given.value_dim, 0},
        queries(memory.take(QUERY_BLOCK * width)),
        grads(memory.take(QUERY_BLOCK * value_width)),
        scores(memory.take(QUERY_BLOCK * KEY_BLOCK)),
        score_grads(memory.take(QUERY_BLOCK * KEY_BLOCK)),
        query_grads(memory.take(QUERY_BLOCK * width)),
        key_grads(memory.take(keys * width)),
        value_grads(memory.take(keys * value_width)),
        width(width),
        value_width(value_width) {}

  static int64_t size(const Attention& given, int64_t keys, int64_t width, int64_t value_width) {
    const int64_t of_keys = Panels::size(keys, given.dim + given.value_dim) + keys * (2 * width + value_width);
    return of_keys + QUERY_BLOCK * (3 * width + 2 * value_width + 2 * KEY_BLOCK) + 16 * 12;
  }

  Scratch memory;
  Panels key_columns, value_columns, key_rows, query_rows, grad_rows;
  float *queries, *grads, *scores, *score_grads, *query_grads, *key_grads, *value_grads;
  int64_t width, value_width;
  float sums[QUERY_BLOCK];    // logarithms of the sums of rows
  float deltas[QUERY_BLOCK];  // products of rows of results and of their gradients
};

template <typename T>
void pack_sequence(const Attention& given, const AttentionSpan& span, int64_t key_head, BackwardSpace& space) {
  const int64_t count = key_count(span);
  space.key_columns.columns = space.value_columns.columns = space.key_rows.depth = count;
  const T* keys = row_of<const T>(given, span, given.key, span.key_begin, key_head);
  const T* values = row_of<const T>(given, span, given.value, span.key_begin, key_head);
  pack_transposed(keys, given.key.row_stride, 0, count, space.key_columns);
  pack_transposed(values, given.value.row_stride, 0, count, space.value_columns);
  pack(keys, given.key.row_stride, 1.0f, space.key_rows);
  memset(space.key_grads, 0, static_cast<size_t>(count * space.width) * sizeof(float));
  memset(space.value_grads, 0, static_cast<size_t>(count * space.value_width) * sizeof(float));
}

template <typename T>
float dot(const T* left, const float* right, int64_t count) {
  Vec sum{};
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) sum += load(left + at) * load(right + at);
  float rest = 0;
  for (; at < count; ++at) rest += load(left[at]) * right[at];
  return sum_of_lanes(sum) + rest;
}

template <typename T>
void pack_queries(const Attention& given, const AttentionSpan& span, int64_t head, Indices queries,
                  BackwardSpace& space) {
  const int64_t count = queries.count(), first = span.query_begin + queries.begin;
  const T* rows = row_of<const T>(given, span, given.query, first, head);
  const T* out_grads = row_of<const T>(given, span, given.out_grad, first, head);
  copy_rows(rows, given.query.row_stride, count, given.dim, given.scale, space.queries);
  copy_rows(out_grads, given.out_grad.row_stride, count, given.value_dim, 1.0f, space.grads);
  space.query_rows.depth = space.grad_rows.depth = count;
  pack(space.queries, given.dim, 1.0f, space.query_rows);
  pack(space.grads, given.value_dim, 1.0f, space.grad_rows);
  for (int64_t row = 0; row < count; ++row) {
    const float sum = *row_of<const float>(given, span, given.logsumexp, first + row, head);
    space.sums[row] = sum == -INFINITY ? INFINITY : sum;  // a row without keys has no weights
    const T* out = row_of<const T>(given, span, given.out, first + row, head);
    space.deltas[row] = dot(out, space.grads + row * given.value_dim, given.value_dim);
  }
}

/// Turns scores into the weights that values were multiplied by, and gradients of weights into those of scores.
template <bool DROPS>
inline void differentiate_row(float* scores, float* grads, int64_t width, float sum, float delta, float raise,
                              KeptBits kept) {
  for (int64_t at = 0; at < width; at += LANES) {
    const Vec weight = exponential(load(scores + at) - sum);
    const Vec grad = load(grads + at);
    store(scores + at, DROPS ? kept.apply(weight, at) : weight);
    store(grads + at, weight * ((DROPS ? kept.apply(grad * raise, at) : grad) - delta));
  }
}

void differentiate(const Attention& given, const AttentionSpan& span, int64_t head, const ScoreTile& tile,
                   BackwardSpace& space) {
  for (int64_t query = tile.queries.begin; query < tile.queries.end; ++query) {
    const int64_t row = query - tile.queries.begin;
    mask_row(given, span, head, tile, query);
    float* grads = space.score_grads + row * KEY_BLOCK;
    const KeptBits kept = kept_row(given, span, head, tile, query);
    const auto run = given.kept ? differentiate_row<true> : differentiate_row<false>;
    run(tile.row(query), grads, tile.width(), space.sums[row], space.deltas[row], given.raise, kept);
  }
}

/// Adds what some queries and keys contribute to the gradients.
void add_gradients(const Attention& given, const Part& part, int64_t head, Indices queries, Indices keys,
                   BackwardSpace& space) {
  const int64_t count = queries.count();
  const Left weights{space.scores, KEY_BLOCK}, score_grads{space.score_grads, KEY_BLOCK};
  multiply<false>({space.queries, given.dim}, count, space.key_columns, keys.begin, keys.end, 0, given.dim,
                  {space.scores, KEY_BLOCK, false});
  multiply<false>({space.grads, given.value_dim}, count, space.value_columns, keys.begin, keys.end, 0, given.value_dim,
                  {space.score_grads, KEY_BLOCK, false});
  differentiate(given, *part.span, head, {space.scores, KEY_BLOCK, queries, keys}, space);
  if (part.has_key_grads) {
    multiply<true>(weights, keys.count(), space.grad_rows, 0, given.value_dim, 0, count,
                   {space.value_grads + keys.begin * space.value_width, space.value_width, true});
    multiply<true>(score_grads, keys.count(), space.query_rows, 0, given.dim, 0, count,
                   {space.key_grads + keys.begin * space.width, space.width, true});
  }
  if (part.has_query_grads) {
    multiply<false>(score_grads, count, space.key_rows, 0, given.dim, keys.begin, keys.count(),
                    {space.query_grads, space.width, true});
  }
}

template <typename T>
void differentiate_queries(const Attention& given, const Part& part, int64_t head, Indices queries,
                           BackwardSpace& space) {
  const AttentionSpan& span = *part.span;
  const Indices keys = attended_by_block(given, span, queries);
  const int64_t last = least(keys.end, part.keys.end);
  const int64_t first = most(keys.begin, part.keys.begin);
  if (!part.has_query_grads && first >= last) return;
  pack_queries<T>(given, span, head, queries, space);
  memset(space.query_grads, 0, static_cast<size_t>(queries.count() * space.width) * sizeof(float));
  for (int64_t begin = first; begin < last; begin = (begin / KEY_BLOCK + 1) * KEY_BLOCK) {
    add_gradients(given, part, head, queries, {begin, least((begin / KEY_BLOCK + 1) * KEY_BLOCK, last)}, space);
  }
  for (int64_t query = queries.begin; part.has_query_grads && query < queries.end; ++query) {
    const float* row = space.query_grads + (query - queries.begin) * space.width;
    write_row(row, given.dim, given.scale, row_of<T>(given, span, given.query_grad, span.query_begin + query, head));
  }
}

template <typename T>
void write_key_gradients(const Attention& given, const Part& part, BackwardSpace& space) {
  for (int64_t key = part.keys.begin; key < part.keys.end; ++key) {
    const int64_t row = part.span->key_begin + key;
    write_row(space.key_grads + key * space.width, given.dim, 1.0f,
              row_of<T>(given, *part.span, given.key_grad, row, part.key_head));
    write_row(space.value_grads + key * space.value_width, given.value_dim, given.raise,
              row_of<T>(given, *part.span, given.value_grad, row, part.key_head));
  }
}

template <typename T>
void differentiate_part(const Attention& given, const Part& part, BackwardSpace& space) {
  const int64_t group = given.heads / given.key_heads;
  const int64_t block = part.span->masking == ort_accel::CAUSAL ? QUERY_BLOCK / 2 : QUERY_BLOCK;
  pack_sequence<T>(given, *part.span, part.key_head, space);
  for (int64_t head = part.key_head * group; head < (part.key_head + 1) * group; ++head) {
    for (int64_t begin = part.queries.begin; begin < part.queries.end; begin += block) {
      differentiate_queries<T>(given, part, head, {begin, least(begin + block, part.queries.end)}, space);
    }
  }
  if (part.has_key_grads) write_key_gradients<T>(given, part, space);
}

/// How sequences are divided: into parts of so many queries for their gradients, and of so many keys for those of keys.
struct Division {
  int64_t queries;
  int64_t keys;

  bool is_whole() const { return queries == EVERYTHING; }
  int64_t query_parts(const AttentionSpan& span) const { return (query_count(span) - 1) / queries + 1; }
  int64_t key_parts(const AttentionSpan& span) const { return is_whole() ? 0 : (key_count(span) - 1) / keys + 1; }
  int64_t parts(const AttentionSpan& span) const { return query_parts(span) + key_parts(span); }
};

inline Division division_of(const Attention& given) {
  const bool is_whole = given.sequences * given.key_heads * 3 / 2 >= given.threads;
  return is_whole ? Division{EVERYTHING, EVERYTHING} : Division{PART_QUERIES, PART_KEYS};
}

/// Returns a task: tasks are counted by sequence, head of keys and part.
inline Part part_of(const Attention& given, const Division& division, int64_t task) {
  const AttentionSpan* span = given.spans;
  while (task >= division.parts(*span) * given.key_heads) task -= division.parts(*span++) * given.key_heads;
  const int64_t number = task % division.parts(*span), key_head = task / division.parts(*span);
  const Indices all_queries{0, query_count(*span)}, all_keys{0, key_count(*span)};
  if (division.is_whole()) return {span, key_head, all_queries, all_keys, true, true};
  const int64_t key_part = number - division.query_parts(*span);
  if (key_part < 0) {
    const int64_t begin = number * division.queries;
    return {span, key_head, {begin, least(begin + division.queries, all_queries.end)}, all_keys, true, false};
  }
  const int64_t begin = key_part * division.keys;
  return {span, key_head, all_queries, {begin, least(begin + division.keys, all_keys.end)}, false, true};
}

/// Computes the gradients of queries, keys and values. Returns 0, or 1 if memory is lacking.
int attention_backward(const Attention* given) {
  const Division division = division_of(*given);
  int64_t tasks = 0;
  for (int64_t at = 0; at < given->sequences; ++at) tasks += division.parts(given->spans[at]) * given->key_heads;
  const bool is_done = run_tasks<BackwardSpace>(tasks, *given, [&](int64_t task, BackwardSpace& space) {
    const Part part = part_of(*given, division, task);
    given->is_bfloat16 ? differentiate_part<BFloat16>(*given, part, space)
                       : differentiate_part<float>(*given, part, space);
  });
  return is_done ? 0 : 1;
}

ORT_ACCEL_KERNEL(attention_backward);

}  // namespace
