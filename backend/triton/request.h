// One Triton request -> one REQUEST frame.  Tensors and parameters are forwarded as they are: what they mean is the
// engine's business.
#pragma once

#include "api.h"
#include "wire.h"

namespace slipstream {

// What one request may bring; more is refused with INVALID_ARG before anything of it is copied (docs/security.md).
constexpr uint32_t kMaxRequestInputs = 256;
constexpr uint32_t kMaxRequestOutputs = 256;
constexpr uint32_t kMaxRequestParameters = 1024;
constexpr size_t kMaxNameBytes = 256;        // of an input, an output or a request parameter
constexpr size_t kMaxRequestIdBytes = 1024;  // of the client's id
constexpr size_t kMaxCommandBytes = 16u << 10;  // of a command to the model; a longer stop counts like any request
constexpr size_t kMaxRequestBytes = 64u << 20;  // of all tensors, names and parameters together

// A random number other than 0.  A handle is a capability, since postprocessing cancels by it: nobody can guess the
// handle of another client's request.  Throws BackendError when the system has no random bytes.
uint64_t new_handle();

// Throws BackendError (INVALID_ARG, UNSUPPORTED) for what is above the limits or cannot be put into a frame.
std::string_view encode_request(FrameWriter& writer, uint64_t handle, TRITONBACKEND_Request* request);

// Throws BackendError (INVALID_ARG) for a command to the model whose frame is this long.
void limit_command(size_t num_bytes);

// The request that this one follows in an ensemble: its UINT64 input REQUEST_HANDLE; 0 if it has none of that form.
uint64_t upstream_handle(TRITONBACKEND_Request* request);

// Whether its responses go to the next step of an ensemble: it names the output request_handle, not text_output.
bool feeds_step(TRITONBACKEND_Request* request);

}  // namespace slipstream
