#include "trace.h"

#include <dlfcn.h>

#include "json_splice.h"
#include "status.h"

struct TRITONSERVER_InferenceTrace;  // the older headers know no contexts of traces

namespace slipstream {
namespace {

// Contexts came with r24.01, and a server may be built without traces: looked up at run time.
struct TraceApi {
  TRITONSERVER_Error* (*trace_of)(TRITONBACKEND_Request*, TRITONSERVER_InferenceTrace**) = nullptr;
  TRITONSERVER_Error* (*context_of)(TRITONSERVER_InferenceTrace*, const char**) = nullptr;

  TraceApi() {
    trace_of = reinterpret_cast<decltype(trace_of)>(dlsym(RTLD_DEFAULT, "TRITONBACKEND_RequestTrace"));
    context_of = reinterpret_cast<decltype(context_of)>(dlsym(RTLD_DEFAULT, "TRITONSERVER_InferenceTraceContext"));
  }
};

bool is_well(TRITONSERVER_Error* error) {
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
  return error == nullptr;
}

}  // namespace

std::string traceparent_of(TRITONBACKEND_Request* request) {
  static const TraceApi api;
  TRITONSERVER_InferenceTrace* trace = nullptr;
  const char* context = nullptr;
  if (api.trace_of == nullptr || api.context_of == nullptr) return "";
  if (!is_well(api.trace_of(request, &trace)) || trace == nullptr) return "";
  if (!is_well(api.context_of(trace, &context)) || context == nullptr || *context == '\0') return "";
  const auto traceparent = json_member(context, "traceparent");
  return traceparent ? json_string(*traceparent) : "";
}

}  // namespace slipstream
