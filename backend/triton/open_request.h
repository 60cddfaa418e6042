// A request of Triton's from execute() to its last response: what is released then, and what its statistics say.
//
// Triton's statistics and traces take a request's times when it is reported, once: so requests are kept until their
// last response has gone out.  Each one is closed exactly once, by the thread that sends its last response.
#pragma once

#include <memory>

#include "api.h"
#include "broadcast.h"

namespace slipstream {

uint64_t monotonic_ns();

struct OpenRequest {
  TRITONBACKEND_ModelInstance* instance = nullptr;
  TRITONBACKEND_Request* request = nullptr;
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  uint64_t received_ns = 0;  // from Triton's queue
  uint64_t passed_ns = 0;    // on to the engine, or refused
  uint64_t id_hash = 0;      // of the client's id; 0: none, or the model has one engine
  bool is_command = false;   // ends others, or controls the model: there is room for it where there is none for others
  bool feeds_step = false;   // its responses go to the next step of an ensemble
  std::shared_ptr<Broadcast> broadcast = nullptr;  // of a request that all replicas have

  // Report and release.  answered_ns: when the engine's last response was there; what follows counts as output.
  void close(bool is_success, uint64_t answered_ns) const;
};

}  // namespace slipstream
