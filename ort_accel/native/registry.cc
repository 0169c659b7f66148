// The table of kernels, by name and instruction set, and its C interface, by which tests and Python call kernels alone.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "kernels/kernel.h"
#include "kernels/matrix.h"

namespace ort_accel {
namespace {

constexpr int LEVELS = 3;

struct Variant {
  void* function = nullptr;
  PackedKernel packed = nullptr;
};

struct Variants {
  Variant by_level[LEVELS] = {};
};

std::map<std::string, Variants>& table() {
  static std::map<std::string, Variants> kernels;
  return kernels;
}

std::mutex& guard() {
  static std::mutex mutex;
  return mutex;
}

int best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx2 ? (has_avx512 ? 2 : 1) : 0;
#else
  return 0;
#endif
}

Variant variant(const char* name, int level) {
  const std::lock_guard<std::mutex> lock(guard());
  const auto found = table().find(name);
  if (found == table().end()) return {};
  for (int at = level; at >= 0; --at) {
    if (found->second.by_level[at].function) return found->second.by_level[at];
  }
  return {};
}

void run_serially(int64_t count, int64_t, Range run, void* context) { run(0, count, context); }

}  // namespace

void (*run_in_parallel)(int64_t, int64_t, Range, void*) = run_serially;
bool (*multiply_matrices)(const Matrix&, const Matrix&, const Matrix*, const Matrix&, int64_t) = nullptr;

KernelEntry::KernelEntry(const char* name, int level, void* function, PackedKernel packed) {
  const std::lock_guard<std::mutex> lock(guard());
  table()[name].by_level[level] = {function, packed};
}

PackedKernel find_kernel(const char* name) {
  static const int level = best_level();
  return variant(name, level).packed;
}

}  // namespace ort_accel

#define EXPORT extern "C" __attribute__((visibility("default")))

/// The best instruction set of this processor: 0 baseline, 1 AVX2 with FMA, 2 AVX-512.
EXPORT int ort_accel_level() { return ort_accel::best_level(); }

/// A kernel's address in the variant of a level, or of the next lower one; null if there is no such kernel.
EXPORT void* ort_accel_kernel(const char* name, int level) { return ort_accel::variant(name, level).function; }

/// Makes a kernel of another library known under a name, to sessions that are created from now on.
EXPORT void ort_accel_add_kernel(const char* name, void* function) {
  ort_accel::KernelEntry(name, 0, function, reinterpret_cast<ort_accel::PackedKernel>(function));
}

/// True if the library has kernels that were compiled for a level.
EXPORT bool ort_accel_has_level(int level) {
  for (const auto& kernel : ort_accel::table()) {
    if (kernel.second.by_level[level].function) return true;
  }
  return false;
}
