// The programs of nodes that call a function: integers that say which outputs there are, and what the arguments are.
//
// `ort_accel/lowering/call_program.py` writes them. Input 0 of a node is the table of sizes: numbers that change with the
// sizes of a batch. A tensor comes from another input of the node, or from the frame: a list of PyTorch's tensors with
// the number of calls that read each of them. The last of these calls gives the tensor back, so that its memory is free
// before the run has ended.
#pragma once

#include <algorithm>

#include "operators/operator.h"

namespace ort_accel {

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
    if (at_ == end_) throw std::runtime_error("the program of a call is too short");
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
      case FRAMED:
        found.number = next();
        found.dtype = static_cast<int32_t>(next());
        found.layout = layout();
        if (found.tag == FRAMED && !reads(found.number)) framed.push_back(found.number);
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

  std::vector<int64_t> framed;  // the positions in the frame that the program reads

 private:
  bool reads(int64_t position) const { return std::find(framed.begin(), framed.end(), position) != framed.end(); }

  const int64_t *at_, *end_;
};

/// What all calls have: outputs to allocate, arguments, and tensors of the frame to give back.
class Program {
 public:
  explicit Program(const OrtKernelInfo* info);

  /// The table of sizes of a run.
  static const int64_t* table(OrtKernelContext* context) { return static_cast<const int64_t*>(input(context, 0).data); }

  /// Returns the memory of a new output.
  void* allocate(OrtKernelContext* context, const int64_t* table, size_t index) const;

  /// Returns a tensor of the frame, as PyTorch's handle.
  int64_t framed(OrtKernelContext* context, int64_t position) const;

  /// Gives tensors of the frame that no later call reads back to PyTorch.
  void release(OrtKernelContext* context) const;

  std::vector<Output> outputs;
  bool writes_outputs;           // the function writes into memory that it is given
  std::vector<int64_t> results;  // for each result of the function, the output that it belongs to
  std::vector<Item> arguments;

 private:
  size_t frame_;                 // the input that holds the frame
  std::vector<int64_t> framed_;  // the positions in the frame that the arguments name
};

}  // namespace ort_accel
