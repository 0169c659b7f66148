// The part of ONNX Runtime's C interface that the operators use.
//
// ONNX Runtime hands its functions over as one table, whose order never changes: a new version appends. So a function
// is its position in the table and its type. `tests/native/test_abi.py` calls each of them on the installed version.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtApi;

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

/// An operator as ONNX Runtime asks for it. Members behind `KernelDestroy` came with later versions, in this order.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
};

}  // extern "C"

namespace ort_accel::ort {

constexpr uint32_t API_VERSION = 16;  // the oldest with CreateKernelV2; onnxruntime-training 1.19.2 has 19
constexpr int FAIL = 1, VARIADIC = 2, UNDEFINED_TYPE = 0;

/// The table of functions, set when ONNX Runtime registers the operators.
extern void* const* table;

template <typename Function>
Function entry(int position) {
  return reinterpret_cast<Function>(table[position]);
}

inline OrtStatus* create_status(const char* message) {
  return entry<OrtStatus* (*)(int, const char*)>(0)(FAIL, message);
}
inline const char* message_of(const OrtStatus* status) { return entry<const char* (*)(const OrtStatus*)>(2)(status); }
inline void release(OrtStatus* status) { entry<void (*)(OrtStatus*)>(93)(status); }

inline OrtStatus* create_domain(const char* name, OrtCustomOpDomain** domain) {
  return entry<OrtStatus* (*)(const char*, OrtCustomOpDomain**)>(26)(name, domain);
}
inline OrtStatus* add_to_domain(OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  return entry<OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*)>(27)(domain, op);
}
inline OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  return entry<OrtStatus* (*)(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain);
}

inline OrtStatus* mutable_data(OrtValue* value, void** data) {
  return entry<OrtStatus* (*)(OrtValue*, void**)>(51)(value, data);
}
inline OrtStatus* rank_of(const OrtTensorTypeAndShapeInfo* info, size_t* rank) {
  return entry<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*)>(61)(info, rank);
}
inline OrtStatus* dimensions_of(const OrtTensorTypeAndShapeInfo* info, int64_t* sizes, size_t rank) {
  return entry<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(62)(info, sizes, rank);
}
inline OrtStatus* type_and_shape(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) {
  return entry<OrtStatus* (*)(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(65)(value, info);
}
inline void release(OrtTensorTypeAndShapeInfo* info) { entry<void (*)(OrtTensorTypeAndShapeInfo*)>(99)(info); }

inline OrtStatus* text_attribute(const OrtKernelInfo* info, const char* name, char* text, size_t* size) {
  return entry<OrtStatus* (*)(const OrtKernelInfo*, const char*, char*, size_t*)>(87)(info, name, text, size);
}
inline OrtStatus* ints_attribute(const OrtKernelInfo* info, const char* name, int64_t* numbers, size_t* size) {
  return entry<OrtStatus* (*)(const OrtKernelInfo*, const char*, int64_t*, size_t*)>(163)(info, name, numbers, size);
}
inline OrtStatus* input_of(const OrtKernelContext* context, size_t index, const OrtValue** value) {
  return entry<OrtStatus* (*)(const OrtKernelContext*, size_t, const OrtValue**)>(90)(context, index, value);
}
inline OrtStatus* output_of(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank, OrtValue** value) {
  return entry<OrtStatus* (*)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(91)(context, index, sizes,
                                                                                                  rank, value);
}

}  // namespace ort_accel::ort
