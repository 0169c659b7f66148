#include "abi/torch.h"

#include <dlfcn.h>

#include <atomic>

#include "kernels/kernel.h"
#include "kernels/matrix.h"

namespace ort_accel::torch {

Functions functions;

namespace {

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

void run_on_threads_of_torch(int64_t count, int64_t grain, Range run, void* context) {
  functions.parallel_for(0, count, grain, run, context);
}

/// A tensor of memory that something else owns; null if torch cannot make it.
class BorrowedTensor {
 public:
  BorrowedTensor(const Matrix& matrix, int32_t dtype) {
    const int64_t sizes[] = {matrix.rows, matrix.columns}, strides[] = {matrix.row_stride, matrix.column_stride};
    functions.create_tensor_from_blob(matrix.data, 2, sizes, strides, 0, dtype, CPU, 0, &tensor);
  }
  ~BorrowedTensor() {
    if (tensor) functions.delete_tensor_object(tensor);
  }
  BorrowedTensor(const BorrowedTensor&) = delete;
  BorrowedTensor& operator=(const BorrowedTensor&) = delete;

  Tensor tensor = nullptr;
};

constexpr int32_t DTYPES[] = {6, 15, 5};  // torch's numbers of the types of elements.h

bool multiply_by_torch(const Matrix& left, const Matrix& right, const Matrix* added, const Matrix& out,
                       int64_t element) {
  const int32_t dtype = DTYPES[element];
  const BorrowedTensor a(left, dtype), b(right, dtype), c(added ? *added : out, dtype), result(out, dtype);
  if (!a.tensor || !b.tensor || !c.tensor || !result.tensor) return false;
  // What is added up in place is one object for torch, which otherwise copies it onto itself.
  const Tensor onto = added && added->data != out.data ? c.tensor : result.tensor;
  if (added) return !functions.addmm(result.tensor, onto, a.tensor, b.tensor, 1, 1);
  return !functions.mm(result.tensor, a.tensor, b.tensor);
}

const char* find_functions() {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (!library) return "torch is not loaded in this process";
  Functions& f = functions;
  const bool found = find(library, "aoti_torch_create_tensor_from_blob", f.create_tensor_from_blob) &&
                     find(library, "aoti_torch_delete_tensor_object", f.delete_tensor_object) &&
                     find(library, "aoti_torch_new_tensor_handle", f.new_tensor_handle) &&
                     find(library, "aoti_torch__reinterpret_tensor", f.view) &&
                     find(library, "aoti_torch_copy_", f.copy) && find(library, "aoti_torch_is_defined", f.is_defined) &&
                     find(library, "aoti_torch_cpu_mm_out", f.mm) && find(library, "aoti_torch_cpu_bmm_out", f.bmm) &&
                     find(library, "aoti_torch_cpu_addmm_out", f.addmm) &&
                     find(library, "aoti_torch_cpu_baddbmm_out", f.baddbmm) &&
                     find(library, "aoti_torch_get_data_ptr", f.data_of) &&
                     find(library, "aoti_torch_dtype_element_size", f.element_size) &&
                     find(library, "torch_call_dispatcher", f.call_dispatcher) &&
                     find(library, "torch_new_list_reserve_size", f.new_list) &&
                     find(library, "torch_list_push_back", f.push_back) &&
                     find(library, "torch_new_string_handle", f.new_text) &&
                     find(library, "torch_parallel_for", f.parallel_for);
  if (!found) return "this version of torch lacks functions of its C interface (2.11 and later have them)";
  find(library, "torch_new_stable_ivalue", f.new_argument);
  find(library, "torch_exception_get_what_without_backtrace", f.last_message);
  run_in_parallel = run_on_threads_of_torch;
  multiply_matrices = multiply_by_torch;
  return nullptr;
}

}  // namespace

const char* attach() {
  static std::atomic<bool> is_found{false};  // torch may be imported after the first call
  if (is_found) return nullptr;
  const char* missing = find_functions();
  is_found = !missing;
  return missing;
}

const char* last_message() {
  const char* message = functions.last_message ? functions.last_message() : nullptr;
  return message ? message : "an operator of PyTorch failed";
}

Argument optional(Argument value) {
  Argument* copy = nullptr;
  if (!functions.new_argument || functions.new_argument(&copy)) copy = new Argument;
  *copy = value;
  return reinterpret_cast<Argument>(copy);
}

}  // namespace ort_accel::torch

/// Gives tensors that a run did not use up back to PyTorch.
extern "C" __attribute__((visibility("default"))) void ort_accel_release(int64_t* tensors, int64_t count) {
  for (int64_t at = 0; at < count; ++at) {
    if (!tensors[at]) continue;
    ort_accel::torch::functions.delete_tensor_object(reinterpret_cast<ort_accel::torch::Tensor>(tensors[at]));
    tensors[at] = 0;
  }
}

/// Finds torch in the process; returns null, or why it cannot be used.
extern "C" __attribute__((visibility("default"))) const char* ort_accel_attach() { return ort_accel::torch::attach(); }
