// Custom operators of ONNX Runtime: what they have in common.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/onnxruntime.h"

namespace ort_accel {

/// One node of a model: made from the node's attributes, and run in each step.
class Node {
 public:
  virtual ~Node() = default;
  /// Runs on the context's inputs and writes its outputs; throws std::runtime_error where it cannot.
  virtual void run(OrtKernelContext* context) = 0;
};

/// An operator under a name, with any number of inputs and outputs of any types.
struct Operator : OrtCustomOp {
  Operator(const char* name, Node* (*make)(const OrtKernelInfo*));
  const char* name;
  Node* (*make)(const OrtKernelInfo*);
};

/// Throws ONNX Runtime's error, if there is one.
void check(OrtStatus* status);

std::string text_attribute(const OrtKernelInfo* info, const char* name);
std::vector<int64_t> ints_attribute(const OrtKernelInfo* info, const char* name);

/// A tensor of ONNX Runtime: its memory and its sizes.
struct Memory {
  void* data;
  size_t rank;
  int64_t sizes[16];
};
constexpr size_t MAX_RANK = 16;

Memory input(const OrtKernelContext* context, size_t index);
void* output(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank);

}  // namespace ort_accel
