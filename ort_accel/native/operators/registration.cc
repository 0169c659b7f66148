// The entry by which ONNX Runtime asks for the operators.
#include "abi/onnxruntime.h"
#include "abi/torch.h"
#include "operators/calls.h"
#include "operators/operator.h"

namespace ort_accel {
namespace {

OrtStatus* register_operators(OrtSessionOptions* options) {
  static const Operator operators[] = {{"AtenCall", make_aten_call}, {"KernelCall", make_kernel_call}};
  static OrtCustomOpDomain* domain = nullptr;  // lives as long as any session
  if (!domain) {
    OrtCustomOpDomain* created = nullptr;
    if (OrtStatus* status = ort::create_domain("ort_accel", &created)) return status;
    for (const Operator& op : operators) {
      if (OrtStatus* status = ort::add_to_domain(created, &op)) return status;
    }
    domain = created;
  }
  return ort::add_domain(options, domain);
}

}  // namespace
}  // namespace ort_accel

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  using namespace ort_accel;
  ort::table = reinterpret_cast<void* const*>(base->GetApi(ort::API_VERSION));
  if (const char* missing = torch::attach()) return ort::create_status(missing);
  return register_operators(options);
}
