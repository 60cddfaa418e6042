#include "open_request.h"

#include <time.h>

#include "status.h"

namespace slipstream {

uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

void OpenRequest::close(bool is_success, uint64_t answered_ns) const {
  const uint64_t ended_ns = monotonic_ns();
  if (factory != nullptr) log_if_failed(TRITONBACKEND_ResponseFactoryDelete(factory), "response factory");
  log_if_failed(
      TRITONBACKEND_ModelInstanceReportStatistics(
          instance, request, is_success, received_ns, passed_ns, answered_ns, ended_ns),
      "statistics");
  if (is_success) {  // Triton's execution count: to it every request is an execution, whatever the engine batches
    log_if_failed(
        TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, 1, received_ns, passed_ns, answered_ns, ended_ns),
        "statistics");
  }
  log_if_failed(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL), "request release");
}

}  // namespace slipstream
