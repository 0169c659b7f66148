// Activations and gated activations, forward and backward, each in one pass.
#include "kernels/math.h"

namespace {

constexpr int64_t GRAIN = 1 << 14;

/// How callers number the functions. EXP and ERF have no gradient here.
enum Function : int64_t { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3, TANH = 4, SIGMOID = 5, EXP = 6, ERF = 7 };

struct Gelu {
  static float value(float x) { return x * 0.5f * (1.0f + erf_of(x * 0x1.6a09e6p-1f)); }

  static float slope(float x) {
    const float below = 0.5f * (1.0f + erf_of(x * 0x1.6a09e6p-1f));
    return below + x * exp_of(x * x * -0.5f) * 0x1.988454p-2f;
  }
};

struct GeluTanh {
  static constexpr float INNER = 0x1.988454p-1f, CUBE = 0.044715f;

  static float value(float x) { return 0.5f * x * (1.0f + tanh_of(INNER * (x + CUBE * x * x * x))); }

  static float slope(float x) {
    const float tanh = tanh_of(INNER * (x + CUBE * x * x * x));
    const float inner = INNER * (1.0f + 3.0f * CUBE * x * x);
    return 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * inner;
  }
};

struct Silu {
  static float value(float x) { return x / (1.0f + exp_of(-x)); }

  static float slope(float x) {
    const float sigmoid = sigmoid_of(x);
    return sigmoid * (1.0f + x * (1.0f - sigmoid));
  }
};

struct Relu {
  static float value(float x) { return x < 0.0f ? 0.0f : x; }
};

/// The gradients of tanh and sigmoid are computed from their results.
struct Tanh {
  static float value(float x) { return tanh_of(x); }
  static float slope(float y) { return 1.0f - y * y; }
};

struct Sigmoid {
  static float value(float x) { return sigmoid_of(x); }
  static float slope(float y) { return (1.0f - y) * y; }
};

struct Exp {
  static float value(float x) { return exp_of(x); }
};

struct Erf {
  static float value(float x) { return erf_of(x); }
};

/// Computes `out[i]` of `x[i]`.
using Unary = void (*)(const float* x, int64_t count, float* out);
/// Computes `out[i]` of `grad[i]` and `x[i]`.
using Binary = void (*)(const float* grad, const float* x, int64_t count, float* out);
/// Computes the gradients of a gate and of what it is multiplied by.
using GateGradients = void (*)(const float* grad, const float* gate, const float* up, int64_t count, float* grad_gate,
                               float* grad_up);

template <typename F>
void values(const float* x, int64_t count, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) out[at] = F::value(x[at]);
}

template <typename F>
void gradients(const float* grad, const float* x, int64_t count, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) out[at] = grad[at] * F::slope(x[at]);
}

template <>
void gradients<Relu>(const float* grad, const float* x, int64_t count, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) out[at] = x[at] <= 0.0f ? 0.0f : grad[at];
}

template <typename F>
void gated_values(const float* gate, const float* up, int64_t count, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) out[at] = F::value(gate[at]) * up[at];
}

template <typename F>
void gated_gradients(const float* grad, const float* gate, const float* up, int64_t count, float* grad_gate,
                     float* grad_up) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) {
    const float given = grad[at], x = gate[at], factor = up[at];
    grad_up[at] = given * F::value(x);
    grad_gate[at] = given * factor * F::slope(x);
  }
}

/// Both from one sigmoid.
template <>
void gated_gradients<Silu>(const float* grad, const float* gate, const float* up, int64_t count, float* grad_gate,
                           float* grad_up) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) {
    const float given = grad[at], x = gate[at], factor = up[at], sigmoid = sigmoid_of(x);
    grad_up[at] = given * (x * sigmoid);
    grad_gate[at] = given * factor * (sigmoid * (1.0f + x * (1.0f - sigmoid)));
  }
}

void add(const float* x, const float* bias, int64_t count, float* out) {
#pragma omp simd
  for (int64_t at = 0; at < count; ++at) out[at] = x[at] + bias[at];
}

constexpr Unary VALUES[] = {values<Gelu>, values<GeluTanh>, values<Silu>, values<Relu>,
                            values<Tanh>, values<Sigmoid>,  values<Exp>,  values<Erf>};
constexpr Binary GRADIENTS[] = {gradients<Gelu>, gradients<GeluTanh>, gradients<Silu>,
                                gradients<Relu>, gradients<Tanh>,     gradients<Sigmoid>};
constexpr Binary GATED_VALUES[] = {gated_values<Gelu>, gated_values<GeluTanh>, gated_values<Silu>};
constexpr GateGradients GATED_GRADIENTS[] = {gated_gradients<Gelu>, gated_gradients<GeluTanh>, gated_gradients<Silu>};

/// Calls `run(row, column, count)` for all tiles of a matrix, on several threads.
template <typename Run>
void for_tiles(int64_t rows, int64_t columns, const Run& run) {
  if (columns <= 0) return;
  const int64_t in_row = (columns + TILE - 1) / TILE;
  const int64_t grain = GRAIN / (columns < TILE ? columns : TILE);
  parallel_for(rows * in_row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile / in_row, column = tile % in_row * TILE;
      run(row, column, columns - column < TILE ? columns - column : TILE);
    }
  });
}

/// Reads a tile and adds the bias, where there is one.
inline const float* read_biased(const Input& x, const Input& bias, int64_t first, int64_t column, int64_t count,
                                float* buffer) {
  const float* const found = x.read(first, count, buffer);
  if (!bias) return found;
  float other[TILE];
  add(found, bias.read(column, count, other), count, buffer);
  return buffer;
}

/// Computes a function of `x`, or of `x + bias`, whose rows have as many columns as the bias.
void activation(int64_t function, const void* x, const void* bias, int64_t rows, int64_t columns, int64_t element,
                void* out) {
  const Input input{x, element}, added{bias, element};
  const Output output{out, element};
  const Unary compute = VALUES[function];
  const bool flat = !bias;
  for_tiles(flat ? 1 : rows, flat ? rows * columns : columns, [&](int64_t row, int64_t column, int64_t count) {
    float buffer[TILE];
    const int64_t first = row * columns + column;
    const float* const values = read_biased(input, added, first, column, count, buffer);
    float* const placed = output.place(first, buffer);
    compute(values, count, placed);
    output.write(placed, first, count);
  });
}

/// Computes the gradient of `x`. Of tanh and sigmoid, `x` are the results.
void activation_backward(int64_t function, const void* grad, const void* x, const void* bias, int64_t rows,
                         int64_t columns, int64_t element, void* grad_x) {
  const Input given{grad, element}, input{x, element}, added{bias, element};
  const Output output{grad_x, element};
  const Binary compute = GRADIENTS[function];
  const bool flat = !bias;
  for_tiles(flat ? 1 : rows, flat ? rows * columns : columns, [&](int64_t row, int64_t column, int64_t count) {
    float buffer[TILE], other[TILE];
    const int64_t first = row * columns + column;
    const float* const grads = given.read(first, count, other);
    const float* const values = read_biased(input, added, first, column, count, buffer);
    float* const placed = output.place(first, other);
    compute(grads, values, count, placed);
    output.write(placed, first, count);
  });
}

/// Computes `function(gate) * up`. Rows of `gate` and `up` begin `gate_stride` and `up_stride` elements after each other.
void gated_activation(int64_t function, const void* gate, const void* up, int64_t rows, int64_t columns,
                      int64_t gate_stride, int64_t up_stride, int64_t element, void* out) {
  const Input gates{gate, element}, factors{up, element};
  const Output output{out, element};
  const Binary compute = GATED_VALUES[function];
  for_tiles(rows, columns, [&](int64_t row, int64_t column, int64_t count) {
    float buffer[TILE], other[TILE];
    const float* const x = gates.read(row * gate_stride + column, count, buffer);
    const float* const factor = factors.read(row * up_stride + column, count, other);
    float* const placed = output.place(row * columns + column, buffer);
    compute(x, factor, count, placed);
    output.write(placed, row * columns + column, count);
  });
}

/// Computes the gradients of `gate` and `up`, whose rows have the same strides as theirs.
void gated_activation_backward(int64_t function, const void* grad, const void* gate, const void* up, int64_t rows,
                               int64_t columns, int64_t gate_stride, int64_t up_stride, int64_t element,
                               void* grad_gate, void* grad_up) {
  const Input given{grad, element}, gates{gate, element}, factors{up, element};
  const Output to_gate{grad_gate, element}, to_up{grad_up, element};
  const GateGradients compute = GATED_GRADIENTS[function];
  for_tiles(rows, columns, [&](int64_t row, int64_t column, int64_t count) {
    float buffer[TILE], other[TILE], third[TILE];
    const int64_t at_gate = row * gate_stride + column, at_up = row * up_stride + column;
    const float* const grads = given.read(row * columns + column, count, third);
    const float* const x = gates.read(at_gate, count, buffer);
    const float* const factor = factors.read(at_up, count, other);
    float *const gate_placed = to_gate.place(at_gate, buffer), *const up_placed = to_up.place(at_up, other);
    compute(grads, x, factor, count, gate_placed, up_placed);
    to_gate.write(gate_placed, at_gate, count);
    to_up.write(up_placed, at_up, count);
  });
}

ORT_ACCEL_KERNEL(activation);
ORT_ACCEL_KERNEL(activation_backward);
ORT_ACCEL_KERNEL(gated_activation);
ORT_ACCEL_KERNEL(gated_activation_backward);

}  // namespace
