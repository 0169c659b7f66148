// The operators of the library.
#pragma once

#include "operators/operator.h"

namespace ort_accel {

/// Makes a node that calls any operator of PyTorch through its dispatcher.
Node* make_aten_call(const OrtKernelInfo* info);

/// Makes a node that calls a kernel of this library.
Node* make_kernel_call(const OrtKernelInfo* info);

}  // namespace ort_accel
