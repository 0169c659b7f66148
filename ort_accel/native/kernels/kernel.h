// What every kernel file includes. A kernel takes plain pointers and sizes, and knows neither torch nor ONNX Runtime.
//
// A kernel file is compiled once for each instruction set, with ISA and ISA_LEVEL defined. So that no function compiled
// for AVX-512 is linked into the code for older processors, everything in a kernel file lies in an unnamed namespace,
// and of the standard library's templates only those that make no code (traits, sequences of indices) are used there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace ort_accel {

/// Runs part of a loop: the indices from `begin` up to `end`.
using Range = void (*)(int64_t begin, int64_t end, void* context);

/// Divides the indices below `count` among PyTorch's threads, in parts of at least `grain`; set when torch is found.
extern void (*run_in_parallel)(int64_t count, int64_t grain, Range run, void* context);

/// An argument of a kernel that is called by its name.
union Value {
  int64_t integer;
  double real;
  void* pointer;
};

/// A kernel called with a list of its arguments. Returns the kernel's result, or 0 if it has none.
using PackedKernel = int64_t (*)(const Value* arguments);

/// Makes a kernel known under a name. The one with the highest level that the processor has is used.
struct KernelEntry {
  KernelEntry(const char* name, int level, void* function, PackedKernel packed);
};

/// Returns a kernel by its name, in the best variant for this processor; null if there is no such kernel.
PackedKernel find_kernel(const char* name);

}  // namespace ort_accel

#ifdef ISA_LEVEL
namespace {

template <typename T>
struct Unpacked;
template <typename T>
struct Unpacked<T*> {
  static T* of(const ort_accel::Value& value) { return static_cast<T*>(value.pointer); }
};
template <>
struct Unpacked<int64_t> {
  static int64_t of(const ort_accel::Value& value) { return value.integer; }
};
template <>
struct Unpacked<double> {
  static double of(const ort_accel::Value& value) { return value.real; }
};

template <auto FUNCTION, typename Result, typename... Arguments, size_t... AT>
int64_t call_unpacked(Result (*)(Arguments...), const ort_accel::Value* values, std::index_sequence<AT...>) {
  if constexpr (std::is_void_v<Result>) {
    FUNCTION(Unpacked<Arguments>::of(values[AT])...);
    return 0;
  } else {
    return FUNCTION(Unpacked<Arguments>::of(values[AT])...);
  }
}

template <typename Result, typename... Arguments>
constexpr std::index_sequence_for<Arguments...> positions_of(Result (*)(Arguments...)) {
  return {};
}

template <auto FUNCTION>
int64_t call_packed(const ort_accel::Value* values) {
  return call_unpacked<FUNCTION>(FUNCTION, values, positions_of(FUNCTION));
}

}  // namespace
#endif

/// Registers a function as a kernel under its own name. It stands at the end of a kernel file.
#define ORT_ACCEL_KERNEL(function)                                                                                  \
  const ort_accel::KernelEntry entry_of_##function(#function, ISA_LEVEL, reinterpret_cast<void*>(&function), \
                                                   &call_packed<&function>)

#ifdef ISA_LEVEL
namespace {

/// Calls `body(begin, end)` for parts of [0, count) on PyTorch's threads.
template <typename Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= grain) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  ort_accel::run_in_parallel(
      count, grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

}  // namespace
#endif
