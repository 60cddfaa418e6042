// What of a request decides which replica of a model gets it.
#pragma once

#include "api.h"
#include "router.h"

namespace slipstream {

struct RoutedRequest {
  PromptBlocks prompt;
  uint64_t id_hash = 0;     // of the client's id; 0 without one
  bool is_stop = false;     // ends the request of its id: for the replica that has it
  bool is_control = false;  // sleep, load an adapter, or a question such as who sleeps: for all replicas
  bool empties_caches = false;
};

// To be asked once encode_request() has found the request within its limits.  What cannot be read does not count: the
// engine refuses it.
RoutedRequest read_routing(TRITONBACKEND_Request* request);

}  // namespace slipstream
