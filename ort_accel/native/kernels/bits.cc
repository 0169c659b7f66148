// Packing of truth values, one byte each, into bits.
#include "kernels/kernel.h"

namespace {

constexpr int64_t GRAIN_BYTES = 1 << 14;

/// Packs `count` bytes of 0 or 1 into bits, the first into the lowest bit; unused bits of the last byte are 0.
void pack_bits(const uint8_t* values, int64_t count, uint8_t* bits) {
  const int64_t whole = count / 8;
  parallel_for(whole, GRAIN_BYTES, [=](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      uint8_t byte = 0;
      for (int bit = 0; bit < 8; ++bit) byte |= static_cast<uint8_t>((values[at * 8 + bit] & 1) << bit);
      bits[at] = byte;
    }
  });
  if (count % 8) {
    uint8_t byte = 0;
    for (int64_t bit = 0; bit < count % 8; ++bit) byte |= static_cast<uint8_t>((values[whole * 8 + bit] & 1) << bit);
    bits[whole] = byte;
  }
}

ORT_ACCEL_KERNEL(pack_bits);

}  // namespace
