// The operator `KernelCall`: calls a kernel of this library.
//
// Its attributes hold the kernel's `name` and a `program` (program.h). A tensor is passed as the address of its first
// element. `ort_accel/lowering/kernel_call.py` writes them.
#include <cstring>

#include "abi/torch.h"
#include "kernels/kernel.h"
#include "operators/calls.h"
#include "operators/program.h"

namespace ort_accel {
namespace {

char* first_element(void* data, const Item& tensor, const int64_t* table) {
  const int64_t offset = tensor.layout.offset.of(table);
  return static_cast<char*>(data) + offset * static_cast<int64_t>(torch::functions.element_size(tensor.dtype));
}

class KernelCall : public Node {
 public:
  explicit KernelCall(const OrtKernelInfo* info) : program_(info) {
    const std::string name = text_attribute(info, "name");
    kernel_ = find_kernel(name.c_str());
    if (!kernel_) throw std::runtime_error("the native library has no kernel " + name);
  }

  void run(OrtKernelContext* context) override {
    const int64_t* const table = Program::table(context);
    std::vector<void*> outputs(program_.outputs.size());
    for (size_t at = 0; at < outputs.size(); ++at) outputs[at] = program_.allocate(context, table, at);
    std::vector<Value> values(program_.arguments.size());
    for (size_t at = 0; at < values.size(); ++at) values[at] = value(context, program_.arguments[at], table, outputs);
    if (kernel_(values.data())) throw std::runtime_error("a kernel got an index out of range");
    program_.release(context);
  }

 private:
  Value value(OrtKernelContext* context, const Item& item, const int64_t* table, const std::vector<void*>& outputs) const {
    Value found{};
    switch (item.tag) {
      case INTEGER: found.integer = item.size.of(table); break;
      case REAL: std::memcpy(&found.real, &item.number, sizeof(double)); break;
      case TENSOR:
        found.pointer = first_element(input(context, static_cast<size_t>(item.number)).data, item, table);
        break;
      case FRAMED: {
        void* data = nullptr;
        const auto tensor = reinterpret_cast<torch::Tensor>(program_.framed(context, item.number));
        if (torch::functions.data_of(tensor, &data)) throw std::runtime_error(torch::last_message());
        found.pointer = first_element(data, item, table);
        break;
      }
      case OUTPUT: found.pointer = outputs[static_cast<size_t>(item.number)]; break;
      default: break;  // an argument that is left out, a null pointer
    }
    return found;
  }

  Program program_;
  PackedKernel kernel_;
};

}  // namespace

Node* make_kernel_call(const OrtKernelInfo* info) { return new KernelCall(info); }

}  // namespace ort_accel
