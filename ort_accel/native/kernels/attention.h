// The arguments of the attention kernels.
#pragma once

#include <cstdint>

namespace ort_accel {

/// Rows of numbers: element (row, head, i) of sequence s is at
/// `data[s * sequence_stride + row * row_stride + head * head_stride + i]`. The sequence stride of packed rows is 0.
struct HeadRows {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
  int64_t sequence_stride;
};

/// How the queries of a sequence are masked: not at all, from later keys, or by the mask.
enum AttentionMasking : int64_t { FULL, CAUSAL, MASKED };

enum MaskType : int64_t { NO_MASK, BOOL_MASK, FLOAT_MASK, BFLOAT16_MASK };

/// A sequence: its rows of queries and of keys.
struct AttentionSpan {
  int64_t query_begin;
  int64_t query_end;
  int64_t key_begin;
  int64_t key_end;
  int64_t masking;
  int64_t offset;      // the first query's position, counted from the first key
  int64_t mask_begin;  // the number within the mask at which head 0, query 0, key 0 stand
  int64_t kept_begin;  // the same for the bits of dropout
};

/// Attention over sequences, packed or each of the same length. Rows in no sequence are neither read nor written.
struct Attention {
  const AttentionSpan* spans;
  int64_t sequences;
  int64_t heads;
  int64_t key_heads;  // divides `heads`
  int64_t dim;        // of queries and keys
  int64_t value_dim;  // of values and results
  int64_t is_bfloat16;
  int64_t window;   // a query attends to keys at a distance below it; 0 for all
  int64_t threads;  // how many there are: if many, the backward divides sequences, too, at the price of more products
  float scale;
  float raise;  // the factor of weights that dropout keeps, 1 / (1 - p)

  HeadRows query;
  HeadRows key;
  HeadRows value;
  HeadRows out;
  HeadRows logsumexp;  // one number for each row and head

  const void* mask;  // true where a query attends, or numbers to add to the scores; keys lie side by side
  int64_t mask_type;
  int64_t mask_head_stride;
  int64_t mask_query_stride;

  const uint8_t* kept;  // bits, 1 for each weight that dropout keeps; null without dropout
  int64_t kept_bytes;
  int64_t kept_head_stride;  // in bits
  int64_t kept_query_stride;

  HeadRows out_grad;
  HeadRows query_grad;
  HeadRows key_grad;
  HeadRows value_grad;
};

}  // namespace ort_accel
