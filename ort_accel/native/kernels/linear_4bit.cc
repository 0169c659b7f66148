// Products with a weight of 4-bit codes as bitsandbytes packs it, and the gradient of their input.
//
// Dequantized numbers are bitsandbytes' own to the bit.
#include "kernels/weight_product.h"

namespace {

constexpr int64_t NESTED_BLOCK = 256;

alignas(64) constexpr float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(64) constexpr float FP4[16] = {
    0.0f, 0.005208333333f, 0.66666667f, 1.0f, 0.33333333f, 0.5f, 0.16666667f, 0.25f,
    0.0f, -0.005208333333f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f};

/// Writes the product alone, so that no compiler joins it with a sum, which would round otherwise.
__attribute__((noinline)) void nested_products(const uint8_t* codes, const float* table, const float* largest,
                                               int64_t begin, int64_t end, float* to) {
  for (int64_t at = begin; at < end; ++at) to[at] = table[codes[at]] * largest[at / NESTED_BLOCK];
}

/// The largest number of each block: as given, or themselves quantized to eight bits.
struct Scales {
  const float* largest;
  const uint8_t* codes;  // null where `largest` are the numbers
  const float* table;
  const float* offset;

  void write(int64_t count, float* to) const {
    parallel_for(count, 1 << 14, [=](int64_t begin, int64_t end) {
      nested_products(codes, table, largest, begin, end, to);
      for (int64_t at = begin; at < end; ++at) to[at] += *offset;
    });
  }
};

#if ISA_LEVEL == 2
typedef uint8_t ByteVec __attribute__((vector_size(LANES / 2)));
typedef uint64_t LongVec __attribute__((vector_size(LANES * 4)));

/// Returns the codes of LANES / 2 bytes, a byte's high bits first. Bits above a code are not cleared.
inline BitVec indices(const uint8_t* pairs) {
  ByteVec bytes;
  memcpy(&bytes, pairs, sizeof bytes);
  const LongVec wide = __builtin_convertvector(bytes, LongVec);
  return (BitVec)(wide >> 4 | wide << 32);
}
#endif

/// A matrix whose elements, row after row, are codes in blocks with a scale each. No block goes on in a second row.
struct Weight4Bit {
  const uint8_t* codes;
  const float* scales;
  int block_bits;  // a block has 2 to the power of these elements
  const float* table;
  int64_t element;  // the type that its numbers are rounded to

  /// Writes `count` numbers of one block, from the one at `first`, an even one.
  void read_in_block(int64_t first, int64_t count, float scale, float* to) const {
    const uint8_t* const pairs = codes + first / 2;
    int64_t at = 0;
#if ISA_LEVEL == 2
    const Vec values = load(table);
    for (; at + LANES <= count; at += LANES) store(to + at, __builtin_shuffle(values, indices(pairs + at / 2)) * scale);
#endif
    for (; at < count; ++at) to[at] = table[at % 2 ? pairs[at / 2] & 15 : pairs[at / 2] >> 4] * scale;
  }

  /// Writes `count` numbers, from the one at `first`, an even one.
  void read(int64_t first, int64_t count, float* to) const {
    const int64_t end = first + count;
    float* target = to;
    for (int64_t begin = first; begin < end;) {
      const int64_t number = begin >> block_bits, last = least((number + 1) << block_bits, end);
      read_in_block(begin, last - begin, scales[number], target);
      target += last - begin;
      begin = last;
    }
    round_numbers(element, count, to);
  }
};

/// Calls a function with the scales of all blocks.
template <typename Run>
void with_scales(const Scales& scales, int64_t blocks, const Run& run) {
  if (!scales.codes) return run(scales.largest);
  const Scratch memory(blocks);
  scales.write(blocks, memory.needed());
  run(memory.data);
}

/// Writes the product of rows [rows, inner] with the transpose of a weight [outer, inner], plus the bias if there is one.
void linear_4bit(const void* x, const uint8_t* codes, const float* largest, const uint8_t* nested_codes,
                 const float* nested_table, const float* nested_offset, int64_t block, int64_t is_fp4, int64_t rows,
                 int64_t outer, int64_t inner, int64_t element, int64_t parts, const void* bias, void* out) {
  with_scales({largest, nested_codes, nested_table, nested_offset}, outer * inner / block,
              [&](const float* scales) {
                const Weight4Bit weight{codes, scales, __builtin_ctzll(block), is_fp4 ? FP4 : NF4, element};
                run_product<Weight4Bit>({{x, element}, weight, true, {bias, element}, {out, element}, rows, inner,
                                         outer, parts});
              });
}

/// Writes the product of gradients [rows, outer] with the weight, whose numbers are first rounded to a type.
void linear_4bit_backward(const void* grad, const uint8_t* codes, const float* largest, const uint8_t* nested_codes,
                          const float* nested_table, const float* nested_offset, int64_t block, int64_t is_fp4,
                          int64_t rows, int64_t outer, int64_t inner, int64_t element, int64_t weight_element,
                          int64_t parts, void* grad_x) {
  with_scales({largest, nested_codes, nested_table, nested_offset}, outer * inner / block,
              [&](const float* scales) {
                const Weight4Bit weight{codes, scales, __builtin_ctzll(block), is_fp4 ? FP4 : NF4, weight_element};
                run_product<Weight4Bit>({{grad, element}, weight, false, {nullptr, element}, {grad_x, element}, rows,
                                         outer, inner, parts});
              });
}

ORT_ACCEL_KERNEL(linear_4bit);
ORT_ACCEL_KERNEL(linear_4bit_backward);

}  // namespace
