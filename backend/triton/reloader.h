// Honest readiness on servers that have no readiness hook (before 26.03), in explicit model control mode.
//
// A model whose engine died is unloaded through the server, so that its ready endpoint says no, and loaded again with
// back-off until that works.  In the other control modes the server refuses each time; the engine then restarts in place.
// A thread for each model that is away, as a load takes minutes; it never touches a model's state, only names.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

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

// What a model was loaded with.
struct GivenConfig {
  std::string json;  // json_sorted(), before the contract completes it
  std::string file;  // the text of its config.pbtxt; "" without one

  // Whether a load from the file gives something else though the file is the same: the load request had a `config`.
  bool is_overridden(const GivenConfig& by_file) const { return file == by_file.file && json != by_file.json; }
};

class ModelReloader {
 public:
  ModelReloader() = default;
  ~ModelReloader();

  // Told by the server's calls of the readiness hook, or by its version: unloading is not needed.
  void use_readiness_hook() { is_in_place_ = true; }

  // kRefused: the engine is to be started again in place.  kUnloading: the model that it served is unloaded.
  enum class Verdict { kPending, kRefused, kUnloading };
  using Ticket = std::shared_ptr<std::atomic<Verdict>>;
  // Unload the model and load it again later as it was given, unless the server exits; keep_alive is held until then (the
  // model's metrics).  A model that is unloaded by then, by somebody else, is not loaded again.  nullptr when it is known that
  // restarting in place is the way.
  Ticket reload(
      std::shared_ptr<ServerExit> exit, const std::string& model, uint64_t version,
      const GivenConfig& given, std::chrono::steady_clock::duration healthy_for, std::shared_ptr<void> keep_alive);

  // Asked at each load, before any engine starts.  Throws BackendError when it is the reloader that loads the model, and
  // the model was given another configuration than that of the file: the reloader loads it with that one then.
  void check_load(const std::string& model, const GivenConfig& by_file);

 private:
  struct Job {
    const std::shared_ptr<ServerExit> exit;
    const std::string model;
    const uint64_t version;
    const GivenConfig given;
    std::shared_ptr<void> keep_alive;
    const Ticket ticket;
    std::chrono::steady_clock::time_point due;
  };
  struct Load {  // under way, of a model
    const GivenConfig* given;
    bool is_overridden = false;
  };
  struct Worker {
    std::thread thread;
    std::atomic<bool> is_done{false};
  };

  void join_done();
  void run(Job& job);
  bool unload(const Job& job);
  bool wait_until_due(const Job& job);
  bool load(Job& job);
  TRITONSERVER_Error* load_as_given(const Job& job);

  std::atomic<bool> is_in_place_{false};
  std::mutex unload_mutex_;  // so that of two replicas' jobs the second finds the model unloaded
  std::mutex mutex_;         // of what follows
  std::condition_variable changed_;
  bool stop_ = false;
  std::map<std::string, Backoff> backoffs_;
  std::map<std::string, Load> loads_;  // by the reloader
  std::list<Worker> workers_;
};

}  // namespace slipstream
