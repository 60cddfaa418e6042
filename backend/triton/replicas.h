// The engines of one model, and which of them gets a request.
//
// The router is here, before the engines and behind Triton: a model's instances are threads of Triton that call
// execute(), nothing else, and any of them may bring a request for any engine.
#pragma once

#include <memory>
#include <vector>

#include "engine.h"
#include "router.h"
#include "routing.h"

namespace slipstream {

class Replicas {
 public:
  // Starts num_replicas engines at once.  setup: that of each, but for its number.
  Replicas(const EngineSetup& setup, int num_replicas, size_t load_slack, Services& services);
  ~Replicas();  // all drain in the same time
  Replicas(const Replicas&) = delete;

  // Wait until all serve.  Throws BackendError with the reason why one never will.
  void wait_until_ready();

  // Whether one serves; if none does, why.
  bool is_up();
  std::string why_down();

  // Hand a request over to the best replica that takes it, or to all of them if it is for all.  It may be answered and
  // released by then.  Throws BackendError, and nothing is taken, when none takes it.
  void submit(FrameWriter& writer, OpenRequest& open);

  // Answer a request that was not taken, and close it.
  void refuse(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& reason) {
    engines_.front()->refuse(request, code, reason);
  }

 private:
  std::vector<size_t> rank(const RoutedRequest& routed);
  void submit_to_best(std::string_view frame, uint64_t handle, const OpenRequest& open, const RoutedRequest& routed);
  void submit_to_all(FrameWriter& writer, OpenRequest& open, bool empties_caches);
  size_t capacity_of(size_t replica) const noexcept;

  Router router_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

}  // namespace slipstream
