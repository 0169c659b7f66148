// The operator `AtenCall`: calls any operator of PyTorch through its dispatcher.
//
// Its attributes hold the operator's `name`, its `overload`, the `texts` among its arguments, and a `program` of
// integers: first the outputs, then how their values come about, then the arguments. `ort_accel/lowering/aten_call.py`
// writes the program. Input 0 of the node is the table of sizes: numbers that change with the sizes of a batch. A tensor
// comes from another input of the node, or from the frame: a list of PyTorch's tensors with the number of calls that
// read each of them. The last of these calls gives the tensor back, so that its memory is free before the run has ended.
#include "operators/aten_call.h"

#include <algorithm>
#include <cstring>

#include "abi/torch.h"

namespace ort_accel {
namespace {

using torch::Argument;

enum Tag : int64_t {
  NONE, INTEGER, REAL, TRUTH, TENSOR, LIST, OPTIONAL, CODE, DEVICE, TEXT, OUTPUT, NUMBER, FRAMED,
};

/// A number that is fixed, or a position in the table of sizes.
struct Size {
  bool in_table;
  int64_t value;
  int64_t of(const int64_t* table) const { return in_table ? table[value] : value; }
};

/// Where the elements of a tensor lie in its memory.
struct Layout {
  std::vector<Size> sizes, strides;
  Size offset{false, 0};
};

struct Item {
  Tag tag = NONE;
  int64_t number = 0;   // an integer, the bits of a real number, the input of a tensor, a position
  int32_t dtype = 0;    // of a tensor
  bool has_layout = false;
  Size size{false, 0};  // of an INTEGER
  Layout layout;
  std::vector<Item> items;
};

struct Output {
  int32_t dtype;
  std::vector<Size> dims;  // as ONNX Runtime sees them, in the order of memory
  Layout layout;           // as PyTorch sees them
};

/// Reads a program of integers.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& numbers) : at_(numbers.data()), end_(at_ + numbers.size()) {}

  int64_t next() {
    if (at_ == end_) throw std::runtime_error("the program of an AtenCall is too short");
    return *at_++;
  }
  Size size() {
    const bool in_table = next() != 0;
    return {in_table, next()};
  }
  std::vector<Size> sizes(int64_t count) {
    std::vector<Size> found;
    for (int64_t at = 0; at < count; ++at) found.push_back(size());
    return found;
  }
  Layout layout() {
    const int64_t rank = next();
    if (rank < 0 || rank > static_cast<int64_t>(MAX_RANK)) throw std::runtime_error("a tensor has more than 16 dimensions");
    Layout found{sizes(rank), sizes(rank)};
    found.offset = size();
    return found;
  }
  Output output() {
    Output found;
    found.dtype = static_cast<int32_t>(next());
    found.layout = layout();
    found.dims = sizes(next());
    return found;
  }
  Item item() {
    Item found;
    found.tag = static_cast<Tag>(next());
    switch (found.tag) {
      case NONE: break;
      case INTEGER: found.size = size(); break;
      case TENSOR:
        found.number = next();
        found.dtype = static_cast<int32_t>(next());
        found.has_layout = next() != 0;
        if (found.has_layout) found.layout = layout();
        break;
      case FRAMED:
        found.number = next();
        if (std::find(framed.begin(), framed.end(), found.number) == framed.end()) framed.push_back(found.number);
        found.layout = layout();
        break;
      case LIST:
      case OPTIONAL:
        for (int64_t left = next(); left > 0; --left) found.items.push_back(item());
        break;
      case NUMBER:
        found.dtype = static_cast<int32_t>(next());
        found.number = next();
        break;
      default: found.number = next();
    }
    return found;
  }

 private:
  const int64_t *at_, *end_;

 public:
  std::vector<int64_t> framed;  // the positions in the frame that the program reads
};

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
      : name_(ort_accel::text_attribute(info, "name")), overload_(ort_accel::text_attribute(info, "overload")) {
    split_texts(ort_accel::text_attribute(info, "texts"));
    const std::vector<int64_t> program = ort_accel::ints_attribute(info, "program");
    Reader reader(program);
    for (int64_t left = reader.next(); left > 0; --left) outputs_.push_back(reader.output());
    writes_outputs_ = reader.next() != 0;
    for (int64_t left = reader.next(); left > 0; --left) results_.push_back(reader.next());
    frame_ = static_cast<size_t>(reader.next());
    for (int64_t left = reader.next(); left > 0; --left) arguments_.push_back(reader.item());
    framed_ = reader.framed;
    product_ = overload_ == "out" ? product_named(name_) : Product::NONE;
  }

  void run(OrtKernelContext* context) override {
    const Memory table = input(context, 0);
    Call call{context, static_cast<const int64_t*>(table.data), {}, {}};
    for (size_t at = 0; at < outputs_.size(); ++at) call.outputs.push_back(allocate(call, at));
    compute(call);
    release(call);
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
    stack.reserve(std::max(arguments_.size(), results_.size()));
    for (const Item& item : arguments_) stack.push_back(argument(call, item));
    stack.resize(std::max(stack.size(), results_.size()));
    require(torch::functions.call_dispatcher(name_.c_str(), overload_.c_str(), stack.data(), 0));
    take_results(call, stack);
  }

  /// Gives tensors of the frame that no later call reads back to PyTorch.
  void release(Call& call) const {
    if (framed_.empty()) return;
    const Memory frame = input(call.context, frame_);
    int64_t* tensors = static_cast<int64_t*>(frame.data);
    int64_t* readers = tensors + frame.sizes[0] / 2;
    for (int64_t at : framed_) {
      if (--readers[at] > 0) continue;
      torch::functions.delete_tensor_object(reinterpret_cast<torch::Tensor>(tensors[at]));
      tensors[at] = 0;
    }
  }

  /// Copies the only argument into the only output, which has another layout.
  void copy(Call& call) const {
    const torch::Tensor source = call.handles.keep(reinterpret_cast<torch::Tensor>(argument(call, arguments_[0])));
    require(torch::functions.copy(call.outputs[0], source, 0));
  }

  void multiply(Call& call) const {
    torch::Tensor tensors[3] = {};
    double factors[2] = {1, 1};
    size_t tensor_count = 0, factor_count = 0;
    for (const Item& item : arguments_) {
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

  static torch::Tensor view(void* data, int32_t dtype, const Layout& layout, const int64_t* table) {
    int64_t sizes[MAX_RANK], strides[MAX_RANK];
    const size_t rank = layout.sizes.size();
    for (size_t dim = 0; dim < rank; ++dim) {
      sizes[dim] = layout.sizes[dim].of(table);
      strides[dim] = layout.strides[dim].of(table);
    }
    torch::Tensor tensor = nullptr;
    require(torch::functions.create_tensor_from_blob(data, static_cast<int64_t>(rank), sizes, strides,
                                                     layout.offset.of(table), dtype, torch::CPU, 0, &tensor));
    return tensor;
  }

  static torch::Tensor view_of(torch::Tensor tensor, const Item& item, const Call& call) {
    int64_t sizes[MAX_RANK], strides[MAX_RANK];
    const size_t rank = item.layout.sizes.size();
    for (size_t dim = 0; dim < rank; ++dim) {
      sizes[dim] = item.layout.sizes[dim].of(call.table);
      strides[dim] = item.layout.strides[dim].of(call.table);
    }
    torch::Tensor view = nullptr;
    require(torch::functions.view(tensor, static_cast<int64_t>(rank), sizes, strides, item.layout.offset.of(call.table),
                                  &view));
    return view;
  }

  static torch::Tensor whole(const Memory& memory, int32_t dtype) {
    int64_t strides[MAX_RANK], stride = 1;
    for (size_t dim = memory.rank; dim-- > 0; stride *= memory.sizes[dim]) strides[dim] = stride;
    torch::Tensor tensor = nullptr;
    require(torch::functions.create_tensor_from_blob(memory.data, static_cast<int64_t>(memory.rank), memory.sizes, strides,
                                                     0, dtype, torch::CPU, 0, &tensor));
    return tensor;
  }

  torch::Tensor allocate(Call& call, size_t at) const {
    const Output& wanted = outputs_[at];
    int64_t dims[MAX_RANK];
    for (size_t dim = 0; dim < wanted.dims.size(); ++dim) dims[dim] = wanted.dims[dim].of(call.table);
    void* data = output(call.context, at, dims, wanted.dims.size());
    return call.handles.keep(view(data, wanted.dtype, wanted.layout, call.table));
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
      case TENSOR: {
        const Memory memory = input(call.context, static_cast<size_t>(item.number));
        return packed(item.has_layout ? view(memory.data, item.dtype, item.layout, call.table) : whole(memory, item.dtype));
      }
      case FRAMED: {
        const int64_t tensor = static_cast<int64_t*>(input(call.context, frame_).data)[item.number];
        if (!tensor) throw std::runtime_error("a tensor of the frame was given back too early");
        return packed(view_of(reinterpret_cast<torch::Tensor>(tensor), item, call));
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
    for (size_t at = 0; at < results_.size(); ++at) {
      if (results_[at] == NO_TENSOR) continue;
      const torch::Tensor result = call.handles.keep(reinterpret_cast<torch::Tensor>(stack[at]));
      bool is_defined = false;
      if (results_[at] < 0 || writes_outputs_) continue;
      require(torch::functions.is_defined(result, &is_defined));
      if (is_defined) require(torch::functions.copy(call.outputs[static_cast<size_t>(results_[at])], result, 0));
    }
  }

  static constexpr int64_t NO_TENSOR = -2;  // a result that is a number; -1 is a tensor that nobody reads
  std::string name_, overload_;
  std::vector<std::string> texts_;
  std::vector<Output> outputs_;
  bool writes_outputs_ = false;   // the operator writes into tensors that it is given
  std::vector<int64_t> results_;  // for each result of the operator, the output that it belongs to
  std::vector<Item> arguments_;
  size_t frame_ = 0;             // the input that holds the frame
  std::vector<int64_t> framed_;  // the positions in the frame that it reads
  Product product_ = Product::NONE;
};

}  // namespace

Node* make_aten_call(const OrtKernelInfo* info) { return new AtenCall(info); }

}  // namespace ort_accel
