// One Triton request -> one REQUEST frame.  Tensors and parameters are forwarded as they are: what they mean is the
// engine's business.
#pragma once

#include "api.h"
#include "wire.h"

namespace slipstream {

// Unique in this process, over all models and restarts.
uint64_t next_handle();

// Throws BackendError (INVALID_ARG, UNSUPPORTED) for what cannot be put into a frame.
std::string_view encode_request(FrameWriter& writer, uint64_t handle, TRITONBACKEND_Request* request);

// The request that this one follows in an ensemble: its UINT64 input REQUEST_HANDLE, or 0.
uint64_t upstream_handle(TRITONBACKEND_Request* request);

}  // namespace slipstream
