// PyTorch's stable C functions, found in the process.
#include <dlfcn.h>

#include "kernels/kernel.h"

namespace {

using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, ort_accel::Range run, void* context);
ParallelFor torch_parallel_for = nullptr;

void run_on_torch_threads(int64_t count, int64_t grain, ort_accel::Range run, void* context) {
  torch_parallel_for(0, count, grain, run, context);
}

}  // namespace

/// Uses PyTorch's threads from now on. Returns null, or what is missing.
extern "C" __attribute__((visibility("default"))) const char* ort_accel_attach() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (!torch) return "libtorch_cpu.so";
  torch_parallel_for = reinterpret_cast<ParallelFor>(dlsym(torch, "torch_parallel_for"));
  if (!torch_parallel_for) return "torch_parallel_for";
  ort_accel::run_in_parallel = run_on_torch_threads;
  return nullptr;
}
