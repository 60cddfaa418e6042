// What a request is if it asks for no text, and what of it decides which replica of a model gets it.
#pragma once

#include "api.h"
#include "router.h"

namespace slipstream {

struct Command {
  bool is_stop = false;     // ends the request of its id: for the replica that has it
  bool is_control = false;  // sleep, load an adapter, or a question such as who sleeps: for all replicas
  bool is_question = false;  // changes nothing
  bool empties_caches = false;
  explicit operator bool() const { return is_stop || is_control; }
};

// To be asked once encode_request() has found the request within its limits.  What cannot be read does not count: the
// engine refuses it.
Command read_command(TRITONBACKEND_Request* request);
uint64_t read_id_hash(TRITONBACKEND_Request* request);  // of the client's id; 0 without one
PromptBlocks read_prompt(TRITONBACKEND_Request* request);

}  // namespace slipstream
