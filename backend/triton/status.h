// Errors and log lines: exceptions inside, TRITONSERVER_Error* at the C border.  Threads that the system can name.
#pragma once

#include <sys/prctl.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "api.h"

namespace slipstream {

class BackendError : public std::runtime_error {
 public:
  BackendError(TRITONSERVER_Error_Code code, const std::string& message) : std::runtime_error(message), code(code) {}
  const TRITONSERVER_Error_Code code;
};

// As it ends each error that clients read: a gRPC stream of Triton carries the text alone.
inline const char* code_name(TRITONSERVER_Error_Code code) {
  switch (code) {
    case TRITONSERVER_ERROR_INTERNAL: return "INTERNAL";
    case TRITONSERVER_ERROR_NOT_FOUND: return "NOT_FOUND";
    case TRITONSERVER_ERROR_INVALID_ARG: return "INVALID_ARG";
    case TRITONSERVER_ERROR_UNAVAILABLE: return "UNAVAILABLE";
    case TRITONSERVER_ERROR_UNSUPPORTED: return "UNSUPPORTED";
    case TRITONSERVER_ERROR_ALREADY_EXISTS: return "ALREADY_EXISTS";
    case TRITONSERVER_ERROR_CANCELLED: return "CANCELLED";
    default: return "UNKNOWN";
  }
}

// Throw what a C API call returned, if it is an error.
inline void check(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  BackendError thrown(TRITONSERVER_ErrorCode(error), TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  throw thrown;
}

inline void log(TRITONSERVER_LogLevel level, const std::string& message) {
  TRITONSERVER_Error* error = TRITONSERVER_LogMessage(level, "slipstream", 0, message.c_str());
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}
inline void log_info(const std::string& message) {
  log(TRITONSERVER_LOG_INFO, message);
}
inline void log_warning(const std::string& message) {
  log(TRITONSERVER_LOG_WARN, message);
}
inline void log_error(const std::string& message) {
  log(TRITONSERVER_LOG_ERROR, message);
}

// For calls whose failure nobody can act upon.  Returns whether the call succeeded.
inline bool log_if_failed(TRITONSERVER_Error* error, const char* what) {
  if (error == nullptr) return true;
  log_warning(std::string(what) + ": " + TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  return false;
}

// The name, of at most 15 characters, is what `top -H` and /proc show, among the server's many threads.  Throws
// std::system_error when the system has no more threads.
template <typename Body>
std::thread named_thread(const char* name, Body body) {
  try {
    return std::thread([name, body] {
      prctl(PR_SET_NAME, name);
      body();
    });
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(), "no thread can be started");
  }
}

// Run an entry point's body; no exception may cross into Triton.
template <typename Body>
TRITONSERVER_Error* at_c_border(Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const BackendError& error) {
    return TRITONSERVER_ErrorNew(error.code, error.what());
  } catch (const std::exception& error) {
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, error.what());
  }
}

}  // namespace slipstream
