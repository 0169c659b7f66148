// What every kernel file includes. A kernel takes plain pointers and sizes, and knows neither torch nor ONNX Runtime.
//
// A kernel file is compiled once for each instruction set, with ISA and ISA_LEVEL defined. So that no function compiled
// for AVX-512 is linked into the code for older processors, everything in a kernel file lies in an unnamed namespace,
// and templates of the standard library (containers, algorithms) are not used there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort_accel {

/// Runs part of a loop: the indices from `begin` up to `end`.
using Range = void (*)(int64_t begin, int64_t end, void* context);

/// Divides the indices below `count` among PyTorch's threads, in parts of at least `grain`; set when torch is found.
extern void (*run_in_parallel)(int64_t count, int64_t grain, Range run, void* context);

/// Makes a kernel known under a name. The one with the highest level that the processor has is used.
struct KernelEntry {
  KernelEntry(const char* name, int level, void* function);
};

/// Returns a kernel by its name, in the best variant for this processor.
void* find_kernel(const char* name);

}  // namespace ort_accel

/// Registers a function as a kernel under its own name. It stands at the end of a kernel file.
#define ORT_ACCEL_KERNEL(function) \
  const ort_accel::KernelEntry entry_of_##function(#function, ISA_LEVEL, reinterpret_cast<void*>(&function))

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
