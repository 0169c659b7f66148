#include "operators/operator.h"

#include "abi/torch.h"

namespace ort_accel {

namespace ort {
void* const* table;
}

namespace {

const Operator* own(const OrtCustomOp* op) { return static_cast<const Operator*>(op); }

OrtStatus* create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  try {
    *kernel = own(op)->make(info);
    return nullptr;
  } catch (const std::exception& error) {
    return ort::create_status(error.what());
  }
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  try {
    static_cast<Node*>(kernel)->run(context);
    return nullptr;
  } catch (const std::exception& error) {
    return ort::create_status(error.what());
  }
}

}  // namespace

Operator::Operator(const char* name, Node* (*make)(const OrtKernelInfo*)) : OrtCustomOp{}, name(name), make(make) {
  version = ort::API_VERSION;
  GetName = [](const OrtCustomOp* op) { return own(op)->name; };
  GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
  GetInputType = GetOutputType = [](const OrtCustomOp*, size_t) { return ort::UNDEFINED_TYPE; };
  GetInputTypeCount = GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  GetInputCharacteristic = GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return ort::VARIADIC; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  CreateKernelV2 = create;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
}

void check(OrtStatus* status) {
  if (!status) return;
  const std::string message = ort::message_of(status);
  ort::release(status);
  throw std::runtime_error(message);
}

std::string text_attribute(const OrtKernelInfo* info, const char* name) {
  size_t size = 0;
  check(ort::text_attribute(info, name, nullptr, &size));
  std::string text(size, '\0');
  check(ort::text_attribute(info, name, text.data(), &size));
  text.resize(size ? size - 1 : 0);  // without the final zero
  return text;
}

std::vector<int64_t> ints_attribute(const OrtKernelInfo* info, const char* name) {
  size_t size = 0;
  check(ort::ints_attribute(info, name, nullptr, &size));
  std::vector<int64_t> numbers(size);
  check(ort::ints_attribute(info, name, numbers.data(), &size));
  return numbers;
}

Memory input(const OrtKernelContext* context, size_t index) {
  const OrtValue* value = nullptr;
  check(ort::input_of(context, index, &value));
  if (!value) throw std::runtime_error("an input of an operator is missing");
  Memory memory{};
  check(ort::mutable_data(const_cast<OrtValue*>(value), &memory.data));
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(ort::type_and_shape(value, &info));
  OrtStatus* status = ort::rank_of(info, &memory.rank);
  if (!status && memory.rank <= MAX_RANK) status = ort::dimensions_of(info, memory.sizes, memory.rank);
  ort::release(info);
  check(status);
  if (memory.rank > MAX_RANK) throw std::runtime_error("a tensor has more than 16 dimensions");
  return memory;
}

void* output(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank) {
  OrtValue* value = nullptr;
  check(ort::output_of(context, index, sizes, rank, &value));
  void* data = nullptr;
  check(ort::mutable_data(value, &data));
  return data;
}

}  // namespace ort_accel
