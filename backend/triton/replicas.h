// The engines of one model, and which of them gets a request.
//
// The router is here, before the engines and behind Triton: a model's instances are threads of Triton that call
// execute(), nothing else, and any of them may bring a request for any engine.
#pragma once

#include <memory>
#include <mutex>
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

  // Hand a request over to the best replica that takes it.  A command for all goes to all of them that are up, or to none:
  // a model must not be half asleep.  The request may be answered and released by then.  Throws BackendError, and nothing
  // is taken, when none takes it.
  void submit(FrameWriter& writer, OpenRequest& open);

  // Answer a request that was not taken, and close it.
  void refuse(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& reason) {
    engines_.front()->refuse(request, code, reason);
  }

 private:
  // One that has taken a request whose frame it has not got yet.
  struct Taken {
    Engine* engine;
    uint64_t handle;
    std::shared_ptr<EngineLink> link;
  };
  std::vector<size_t> rank(const PromptBlocks& prompt);
  size_t owner_of(uint64_t id_hash);
  // To the first of these that takes it.
  void submit_to_one(
      const std::vector<size_t>& replicas, std::string_view frame, uint64_t handle, const OpenRequest& open,
      const PromptBlocks& prompt);
  void submit_to_all(FrameWriter& writer, OpenRequest& open, const Command& command);
  std::vector<Taken> take_by_all(const OpenRequest& open);
  size_t capacity_of(size_t replica) const noexcept;

  Router router_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::mutex command_mutex_;  // one command at a time is handed over
  std::weak_ptr<Broadcast> change_;  // the last command that changes the replicas
};

}  // namespace slipstream
