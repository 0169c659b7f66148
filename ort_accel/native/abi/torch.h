// The part of libtorch's C interface that the operators use. Its functions are found in the process, so that one binary
// serves every version of torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort_accel::torch {

struct TensorObject;
using Tensor = TensorObject*;
struct ListObject;
using List = ListObject*;
struct TextObject;
using Text = TextObject*;
using Argument = uint64_t;  // a number, or a pointer to what does not fit

constexpr int32_t CPU = 0;

struct Functions {
  int32_t (*create_tensor_from_blob)(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides,
                                     int64_t offset, int32_t dtype, int32_t device, int32_t index, Tensor* result);
  int32_t (*delete_tensor_object)(Tensor);
  int32_t (*new_tensor_handle)(Tensor, Tensor* result);
  int32_t (*view)(Tensor, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, Tensor* result);
  int32_t (*copy)(Tensor self, Tensor source, int32_t non_blocking);
  int32_t (*mm)(Tensor result, Tensor, Tensor);
  int32_t (*bmm)(Tensor result, Tensor, Tensor);
  int32_t (*addmm)(Tensor result, Tensor, Tensor, Tensor, double beta, double alpha);
  int32_t (*baddbmm)(Tensor result, Tensor, Tensor, Tensor, double beta, double alpha);
  int32_t (*data_of)(Tensor, void** result);
  size_t (*element_size)(int32_t dtype);
  int32_t (*is_defined)(Tensor, bool* result);
  int32_t (*call_dispatcher)(const char* name, const char* overload, Argument* stack, uint64_t built_for);
  int32_t (*new_list)(uintptr_t size, List* result);
  int32_t (*push_back)(List, Argument);
  int32_t (*new_text)(const char* text, uintptr_t size, Text* result);
  int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*), void* context);
  int32_t (*new_argument)(Argument** result);  // from torch 2.13 on
  const char* (*last_message)();               // from torch 2.13 on
};

extern Functions functions;

/// Finds the functions; returns null, or why they are not there.
const char* attach();

/// Returns the message of the last exception, as far as torch tells it.
const char* last_message();

/// Returns a copy of an argument in memory that torch frees, as it wants optional arguments.
Argument optional(Argument value);

}  // namespace ort_accel::torch
