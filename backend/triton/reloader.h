// Honest readiness on servers that have no readiness hook (before 26.03), in explicit model control mode.
//
// A model whose engine died is unloaded through the server, so that its ready endpoint says no, and loaded again with
// back-off until that works.  In the other control modes the server refuses each time; the engine then restarts in place.
// One thread for the whole backend; it never touches a model's state, only names.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "api.h"
#include "server_exit.h"

namespace slipstream {

class Backoff {
 public:
  using Clock = std::chrono::steady_clock;
  // How long to wait before the next start: 0.5 s doubling to 30 s, from the beginning after 10 s of health.  An engine that
  // was up for so long has not died of how it was started.
  std::chrono::milliseconds next(Clock::duration healthy_for);

 private:
  std::chrono::milliseconds delay_{0};
};

class ModelReloader {
 public:
  ModelReloader() = default;
  ~ModelReloader();

  // Told by the server's calls of the readiness hook, or by its version: unloading is not needed.
  void use_readiness_hook() { is_in_place_ = true; }

  enum class Verdict { kPending, kRefused, kUnloading };
  using Ticket = std::shared_ptr<std::atomic<Verdict>>;
  // Unload the model and load it again later, unless the server exits; keep_alive is held until then (the model's
  // metrics).  nullptr when it is
  // known that restarting in place is the way.
  Ticket reload(
      std::shared_ptr<ServerExit> exit, const std::string& model, std::chrono::steady_clock::duration healthy_for,
      std::shared_ptr<void> keep_alive);

 private:
  struct Job {
    std::shared_ptr<ServerExit> exit;
    std::string model;
    std::shared_ptr<void> keep_alive;
    Ticket ticket;
    bool is_unloaded = false;
    std::chrono::steady_clock::time_point due;
  };

  void run();
  void advance(Job& job);
  bool unload(Job& job);

  std::atomic<bool> is_in_place_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::vector<Job> jobs_;
  std::map<std::string, Backoff> backoffs_;
  std::thread thread_;
};

}  // namespace slipstream
