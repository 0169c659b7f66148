#include "operators/program.h"

#include "abi/torch.h"

namespace ort_accel {

Program::Program(const OrtKernelInfo* info) {
  const std::vector<int64_t> numbers = ints_attribute(info, "program");
  Reader reader(numbers);
  for (int64_t left = reader.next(); left > 0; --left) outputs.push_back(reader.output());
  writes_outputs = reader.next() != 0;
  for (int64_t left = reader.next(); left > 0; --left) results.push_back(reader.next());
  frame_ = static_cast<size_t>(reader.next());
  for (int64_t left = reader.next(); left > 0; --left) arguments.push_back(reader.item());
  framed_ = reader.framed;
}

void* Program::allocate(OrtKernelContext* context, const int64_t* table, size_t index) const {
  const Output& wanted = outputs[index];
  int64_t dims[MAX_RANK];
  for (size_t dim = 0; dim < wanted.dims.size(); ++dim) dims[dim] = wanted.dims[dim].of(table);
  return output(context, index, dims, wanted.dims.size());
}

int64_t Program::framed(OrtKernelContext* context, int64_t position) const {
  const int64_t tensor = static_cast<int64_t*>(input(context, frame_).data)[position];
  if (!tensor) throw std::runtime_error("a tensor of the frame was given back too early");
  return tensor;
}

void Program::release(OrtKernelContext* context) const {
  if (framed_.empty()) return;
  const Memory frame = input(context, frame_);
  int64_t* tensors = static_cast<int64_t*>(frame.data);
  int64_t* readers = tensors + frame.sizes[0] / 2;
  for (int64_t at : framed_) {
    if (--readers[at] > 0) continue;
    torch::functions.delete_tensor_object(reinterpret_cast<torch::Tensor>(tensors[at]));
    tensors[at] = 0;
  }
}

}  // namespace ort_accel
