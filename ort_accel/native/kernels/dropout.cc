// Dropout with the draws of PyTorch's `bernoulli_`: the mt19937 generator, of which each element takes two words.
#include <cstring>

#include "kernels/elements.h"

namespace {

constexpr int64_t BLOCK_WORDS = 624;
constexpr int64_t CHUNK_BLOCKS = 24;
constexpr int64_t CHUNK_WORDS = CHUNK_BLOCKS * BLOCK_WORDS;
constexpr int64_t PART = 512;
constexpr int64_t GRAIN = 1 << 15;

/// The bytes of `torch.Generator.get_state` for the CPU, as far as they belong to mt19937.
struct GeneratorState {
  uint64_t seed;
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[BLOCK_WORDS];
};

/// The words of a generator in their order, before tempering: a block that is in use, and those that follow it.
struct Words {
  uint32_t at[BLOCK_WORDS + CHUNK_WORDS];
  int64_t position;
};

inline uint32_t temper(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

/// Computes the `count` words that follow the first block.
void extend(uint32_t* words, int64_t count) {
#pragma omp simd safelen(128)
  for (int64_t at = 0; at < count; ++at) {
    const uint32_t mixed = (words[at] & 0x80000000u) | (words[at + 1] & 0x7fffffffu);
    const uint32_t odd = 0u - (words[at + 1] & 1u);
    words[at + BLOCK_WORDS] = words[at + 397] ^ (mixed >> 1) ^ (odd & 0x9908b0dfu);
  }
}

/// Compares the last 53 bits of a pair of words, the first of which is the higher one, with a limit.
inline bool is_below(const uint32_t* pair, uint64_t limit) {
  const uint64_t number = static_cast<uint64_t>(temper(pair[0])) << 32 | temper(pair[1]);
  return (number & ((uint64_t{1} << 53) - 1)) < limit;
}

/// The higher word decides nearly always. Where it equals the limit's, all pairs are compared anew, with both words.
void compare(const uint32_t* pairs, int64_t count, uint64_t limit, uint8_t* kept) {
  const uint32_t high = static_cast<uint32_t>(limit >> 32);
  uint32_t undecided = 0;
#pragma omp simd reduction(| : undecided)
  for (int64_t at = 0; at < count; ++at) {
    const uint32_t word = temper(pairs[2 * at]) & 0x1fffffu;
    kept[at] = word < high;
    undecided |= word == high;
  }
  if (!undecided) return;
  for (int64_t at = 0; at < count; ++at) kept[at] = is_below(pairs + 2 * at, limit);
}

/// Packs bytes of 0 or 1 into bits, the first into the lowest bit.
void pack(const uint8_t* kept, int64_t count, uint8_t* bits) {
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    uint64_t eight;
    memcpy(&eight, kept + at, 8);
    bits[at / 8] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
  }
  if (at == count) return;
  uint8_t last = 0;
  for (int64_t bit = 0; at + bit < count; ++bit) last |= static_cast<uint8_t>(kept[at + bit] << bit);
  bits[at / 8] = last;
}

void take_words(const GeneratorState& state, Words& words) {
  for (int64_t at = 0; at < BLOCK_WORDS; ++at) words.at[at] = static_cast<uint32_t>(state.words[at]);
  words.position = BLOCK_WORDS - (state.left - 1);
}

/// Hands the block back that the last word was taken from.
void return_words(const Words& words, GeneratorState& state) {
  const int64_t begin = (words.position - 1) / BLOCK_WORDS * BLOCK_WORDS;
  for (int64_t at = 0; at < BLOCK_WORDS; ++at) state.words[at] = words.at[begin + at];
  state.next = static_cast<uint64_t>(words.position - begin);
  state.left = static_cast<int32_t>(BLOCK_WORDS - (words.position - begin) + 1);
}

/// Computes the words for up to `count` elements, and returns for how many there are any.
int64_t next_chunk(Words& words, int64_t count) {
  if (words.position > BLOCK_WORDS) {
    const int64_t begin = (words.position - 1) / BLOCK_WORDS * BLOCK_WORDS;
    memmove(words.at, words.at + begin, BLOCK_WORDS * sizeof(uint32_t));
    words.position -= begin;
  }
  const int64_t most = (BLOCK_WORDS + CHUNK_WORDS - words.position) / 2;
  const int64_t taken = count < most ? count : most;
  const int64_t blocks = (words.position + 2 * taken - 1) / BLOCK_WORDS;
  extend(words.at, blocks * BLOCK_WORDS);
  return taken;
}

/// Draws `count` elements and hands them to `use(first, bytes of 0 or 1, how many)`, in parts of a multiple of 8.
template <typename Use>
void draw(GeneratorState& state, int64_t count, double probability, const Use& use) {
  const double scaled = probability * 0x1p53;
  const uint64_t whole = static_cast<uint64_t>(scaled);
  const uint64_t limit = whole + (static_cast<double>(whole) < scaled);
  Words words;
  uint8_t kept[PART];
  take_words(state, words);
  for (int64_t done = 0, filled = 0, ready = 0; done < count;) {
    if (!ready) ready = next_chunk(words, count - done - filled);
    const int64_t taken = ready < PART - filled ? ready : PART - filled;
    compare(words.at + words.position, taken, limit, kept + filled);
    words.position += 2 * taken;
    ready -= taken;
    filled += taken;
    if (filled < PART && done + filled < count) continue;
    use(done, kept, filled);
    done += filled;
    filled = 0;
  }
  if (count > 0) return_words(words, state);
}

/// Draws a mask of bytes: 1 with the probability, else 0. The state goes on as PyTorch's own would.
void draw_mask(uint8_t* state, int64_t count, double probability, uint8_t* mask) {
  draw(*reinterpret_cast<GeneratorState*>(state), count, probability,
       [=](int64_t first, const uint8_t* kept, int64_t taken) { memcpy(mask + first, kept, taken); });
}

/// Draws a mask of bits, 8 a byte, the first in the lowest bit. The unused bits of the last byte are 0.
void draw_bits(uint8_t* state, int64_t count, double probability, uint8_t* bits) {
  draw(*reinterpret_cast<GeneratorState*>(state), count, probability,
       [=](int64_t first, const uint8_t* kept, int64_t taken) { pack(kept, taken, bits + first / 8); });
}

constexpr int64_t LANES = 32;

/// Multiplies whole groups of 32, each of which has a word of bits, and the rest one by one.
void scale_by_bits(const float* x, const uint8_t* bits, int64_t count, float scale, float* out) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    uint32_t word;
    memcpy(&word, bits + at / 8, sizeof(word));
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) out[at + lane] = x[at + lane] * (word >> lane & 1 ? scale : 0.0f);
  }
  for (; at < count; ++at) out[at] = x[at] * (bits[at / 8] >> at % 8 & 1 ? scale : 0.0f);
}

/// Multiplies by `scale` where a bit is set, and by 0 elsewhere: a dropout's gradient, or a dropout drawn before.
void apply_dropout(const void* x, const uint8_t* bits, int64_t count, double scale, int64_t element, void* out) {
  const Input input{x, element};
  const Output output{out, element};
  parallel_for((count + TILE - 1) / TILE, GRAIN / TILE, [=](int64_t begin, int64_t end) {
    float buffer[TILE];
    for (int64_t at = begin * TILE; at < end * TILE && at < count; at += TILE) {
      const int64_t taken = count - at < TILE ? count - at : TILE;
      float* const scaled = output.place(at, buffer);
      scale_by_bits(input.read(at, taken, buffer), bits + at / 8, taken, static_cast<float>(scale), scaled);
      output.write(scaled, at, taken);
    }
  });
}

/// Draws a dropout's bits and applies them. Eager rounds the scale to the element type, except for gradients.
void dropout(uint8_t* state, const void* x, int64_t count, double probability, double scale, int64_t element,
             uint8_t* bits, void* out) {
  draw_bits(state, count, probability, bits);
  apply_dropout(x, bits, count, scale, element, out);
}

ORT_ACCEL_KERNEL(draw_mask);
ORT_ACCEL_KERNEL(draw_bits);
ORT_ACCEL_KERNEL(apply_dropout);
ORT_ACCEL_KERNEL(dropout);

}  // namespace
