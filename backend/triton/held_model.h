// Whether the server has done with a model and cannot say so.
//
// Server 2.51 finalizes a model when the last reference on it goes.  A gRPC stream keeps one until its client closes
// it, and a request whose cancel met its last response keeps one for good: the model is unloaded, or replaced by another
// load, and TRITONBACKEND_ModelInstanceFinalize is not called.  Its engine need not keep its memory for that.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "api.h"
#include "server_exit.h"

namespace slipstream {

// Whether the server has unloaded this model, or is about to; false when it does not say.
bool is_unloaded(TRITONSERVER_Server* server, const std::string& name, uint64_t version);

class HeldModel {
 public:
  // patience: how long a model without requests has to be gone from the server.
  HeldModel(std::shared_ptr<ServerExit> exit, std::string name, uint64_t version, std::chrono::milliseconds patience)
      : exit_(std::move(exit)), name_(std::move(name)), version_(version), patience_(patience) {}

  // To be asked every half second or so while the model has no request and has had some (else nothing holds it), from
  // one thread.  is_replaced: requests for this model go to another one.
  bool is_given_up(bool is_replaced);
  void is_used() { gone_since_.reset(); }

 private:
  using Clock = std::chrono::steady_clock;

  const std::shared_ptr<ServerExit> exit_;
  const std::string name_;
  const uint64_t version_;
  const std::chrono::milliseconds patience_;
  std::optional<Clock::time_point> gone_since_;
};

}  // namespace slipstream
