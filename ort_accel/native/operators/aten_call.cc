// The operator `AtenCall`: calls any operator of PyTorch through its dispatcher.
//
// Its attributes hold the operator's `name`, its `overload`, the `texts` among its arguments, and a `program`
// (program.h). `ort_accel/lowering/aten_call.py` writes them.
#include <algorithm>
#include <cstring>

#include "abi/torch.h"
#include "operators/calls.h"
#include "operators/program.h"

namespace ort_accel {
namespace {

using torch::Argument;

/// Products, whose functions torch exports by themselves. The dispatcher's C interface takes no numbers of any type,
/// which two of them have as arguments.
enum class Product { NONE, MM, BMM, ADDMM, BADDBMM };

Product product_named(const std::string& name) {
  if (name == "aten::mm") return Product::MM;
  if (name == "aten::bmm") return Product::BMM;
  if (name == "aten::addmm") return Product::ADDMM;
  return name == "aten::baddbmm" ? Product::BADDBMM : Product::NONE;
}

/// Owns tensors until they are handed to the dispatcher.
class Handles {
 public:
  ~Handles() {
    for (torch::Tensor tensor : tensors_) torch::functions.delete_tensor_object(tensor);
  }
  torch::Tensor keep(torch::Tensor tensor) {
    tensors_.push_back(tensor);
    return tensor;
  }

 private:
  std::vector<torch::Tensor> tensors_;
};

void require(int32_t code) {
  if (code) throw std::runtime_error(torch::last_message());
}

class AtenCall : public Node {
 public:
  explicit AtenCall(const OrtKernelInfo* info)
      : program_(info), name_(text_attribute(info, "name")), overload_(text_attribute(info, "overload")) {
    split_texts(text_attribute(info, "texts"));
    product_ = overload_ == "out" ? product_named(name_) : Product::NONE;
  }

  void run(OrtKernelContext* context) override {
    Call call{context, Program::table(context), {}, {}};
    for (size_t at = 0; at < program_.outputs.size(); ++at) call.outputs.push_back(allocate(call, at));
    compute(call);
    program_.release(context);
  }

 private:
  struct Call {
    OrtKernelContext* context;
    const int64_t* table;
    Handles handles;
    std::vector<torch::Tensor> outputs;
  };

  void compute(Call& call) const {
    if (name_.empty()) return copy(call);
    if (product_ != Product::NONE) return multiply(call);
    std::vector<Argument> stack;
    stack.reserve(std::max(program_.arguments.size(), program_.results.size()));
    for (const Item& item : program_.arguments) stack.push_back(argument(call, item));
    stack.resize(std::max(stack.size(), program_.results.size()));
    require(torch::functions.call_dispatcher(name_.c_str(), overload_.c_str(), stack.data(), 0));
    take_results(call, stack);
  }

  /// Copies the only argument into the only output, which has another layout.
  void copy(Call& call) const {
    const torch::Tensor source = call.handles.keep(reinterpret_cast<torch::Tensor>(argument(call, program_.arguments[0])));
    require(torch::functions.copy(call.outputs[0], source, 0));
  }

  void multiply(Call& call) const {
    torch::Tensor tensors[3] = {};
    double factors[2] = {1, 1};
    size_t tensor_count = 0, factor_count = 0;
    for (const Item& item : program_.arguments) {
      if ((item.tag == TENSOR || item.tag == FRAMED) && tensor_count < 3) {
        tensors[tensor_count++] = call.handles.keep(reinterpret_cast<torch::Tensor>(argument(call, item)));
      } else if (item.tag == REAL && factor_count < 2) {
        std::memcpy(&factors[factor_count++], &item.number, sizeof(double));
      }
    }
    const torch::Functions& f = torch::functions;
    const torch::Tensor result = call.outputs[0];
    switch (product_) {
      case Product::MM: return require(f.mm(result, tensors[0], tensors[1]));
      case Product::BMM: return require(f.bmm(result, tensors[0], tensors[1]));
      case Product::ADDMM: return require(f.addmm(result, tensors[0], tensors[1], tensors[2], factors[0], factors[1]));
      default: require(f.baddbmm(result, tensors[0], tensors[1], tensors[2], factors[0], factors[1]));
    }
  }

  void split_texts(const std::string& joined) {
    size_t begin = 0;
    for (size_t end; (end = joined.find('\n', begin)) != std::string::npos; begin = end + 1) {
      texts_.push_back(joined.substr(begin, end - begin));
    }
  }

  // A layout at the sizes of one call.
  struct Placed {
    Placed(const Layout& layout, const int64_t* table)
        : rank(static_cast<int64_t>(layout.sizes.size())), offset(layout.offset.of(table)) {
      for (size_t dim = 0; dim < layout.sizes.size(); ++dim) {
        sizes[dim] = layout.sizes[dim].of(table);
        strides[dim] = layout.strides[dim].of(table);
      }
    }

    int64_t rank, offset, sizes[MAX_RANK], strides[MAX_RANK];
  };

  static torch::Tensor at_address(void* data, int32_t dtype, const Layout& layout, const int64_t* table) {
    const Placed placed(layout, table);
    torch::Tensor tensor = nullptr;
    require(torch::functions.create_tensor_from_blob(data, placed.rank, placed.sizes, placed.strides, placed.offset, dtype,
                                                     torch::CPU, 0, &tensor));
    return tensor;
  }

  static torch::Tensor view(torch::Tensor tensor, const Layout& layout, const int64_t* table) {
    const Placed placed(layout, table);
    torch::Tensor view = nullptr;
    require(torch::functions.view(tensor, placed.rank, placed.sizes, placed.strides, placed.offset, &view));
    return view;
  }

  torch::Tensor allocate(Call& call, size_t at) const {
    void* const data = program_.allocate(call.context, call.table, at);
    return call.handles.keep(at_address(data, program_.outputs[at].dtype, program_.outputs[at].layout, call.table));
  }

  static torch::Tensor another(torch::Tensor tensor) {
    torch::Tensor copy = nullptr;
    require(torch::functions.new_tensor_handle(tensor, &copy));
    return copy;
  }

  static Argument packed(const void* pointer) { return reinterpret_cast<Argument>(pointer); }

  Argument argument(Call& call, const Item& item) const {
    switch (item.tag) {
      case NONE: return 0;
      case INTEGER: return static_cast<Argument>(item.size.of(call.table));
      case TENSOR:
        return packed(
            at_address(input(call.context, static_cast<size_t>(item.number)).data, item.dtype, item.layout, call.table));
      case FRAMED: {
        const int64_t tensor = program_.framed(call.context, item.number);
        return packed(view(reinterpret_cast<torch::Tensor>(tensor), item.layout, call.table));
      }
      case LIST: return list(call, item);
      case OPTIONAL: return torch::optional(argument(call, item.items[0]));
      case TEXT: {
        const std::string& text = texts_[static_cast<size_t>(item.number)];
        torch::Text copy = nullptr;
        require(torch::functions.new_text(text.c_str(), text.size(), &copy));
        return packed(copy);
      }
      case OUTPUT: return packed(another(call.outputs[static_cast<size_t>(item.number)]));
      case NUMBER: {
        torch::Tensor tensor = nullptr;
        require(torch::functions.create_tensor_from_blob(const_cast<int64_t*>(&item.number), 0, nullptr, nullptr, 0,
                                                         item.dtype, torch::CPU, 0, &tensor));
        return packed(tensor);
      }
      default: return static_cast<Argument>(item.number);
    }
  }

  Argument list(Call& call, const Item& item) const {
    torch::List list = nullptr;
    require(torch::functions.new_list(item.items.size(), &list));
    for (const Item& part : item.items) require(torch::functions.push_back(list, argument(call, part)));
    return packed(list);
  }

  /// Copies results that the operator made itself, and gives all of them back to PyTorch.
  void take_results(Call& call, const std::vector<Argument>& stack) const {
    for (size_t at = 0; at < program_.results.size(); ++at) {
      if (program_.results[at] == NO_TENSOR) continue;
      const torch::Tensor result = call.handles.keep(reinterpret_cast<torch::Tensor>(stack[at]));
      bool is_defined = false;
      if (program_.results[at] < 0 || program_.writes_outputs) continue;
      require(torch::functions.is_defined(result, &is_defined));
      if (is_defined) require(torch::functions.copy(call.outputs[static_cast<size_t>(program_.results[at])], result, 0));
    }
  }

  static constexpr int64_t NO_TENSOR = -2;  // a result that is a number; -1 is a tensor that nobody reads
  Program program_;
  std::string name_, overload_;
  std::vector<std::string> texts_;
  Product product_ = Product::NONE;
};

}  // namespace

Node* make_aten_call(const OrtKernelInfo* info) { return new AtenCall(info); }

}  // namespace ort_accel
