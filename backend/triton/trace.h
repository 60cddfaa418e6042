// The trace that the server keeps of a request, with --trace-config mode=opentelemetry.
#pragma once

#include <string>

#include "api.h"

namespace slipstream {

// The request parameter that tells the engine (core/trace_context.py).
constexpr char kTritonTraceparent[] = "triton_traceparent";

// W3C traceparent of the server's own span of the request; "" if it has none.
std::string traceparent_of(TRITONBACKEND_Request* request);

}  // namespace slipstream
