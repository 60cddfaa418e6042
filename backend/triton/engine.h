// An engine of a model: start it, keep it running, hand requests to it and its answers to Triton.
//
// Threads: `supervisor_` starts the process and reads its frames for as long as it lives, then starts the next one;
// `watcher_` looks for cancelled requests; submit() runs on Triton's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api.h"
#include "engine_directory.h"
#include "engine_process.h"
#include "engine_setup.h"
#include "engine_socket.h"
#include "held_model.h"
#include "live_requests.h"
#include "metrics.h"
#include "open_request.h"
#include "pacing.h"
#include "reloader.h"
#include "server_exit.h"
#include "status.h"

namespace slipstream {

// What all models of the process share; outlives them.
struct Services {
  MetricRegistry metrics;
  HttpPacer pacer;
  ModelReloader reloader;
  EngineDirectory engines;
  ExitGuard exit_guard;  // asks the engines
};

class Engine {
 public:
  Engine(EngineSetup setup, Services& services);
  ~Engine();  // drains, then stops the process
  // Have it drain, without waiting: engines that end together have the same time.
  void begin_end();
  Engine(const Engine&) = delete;

  // Wait until the engine serves.  Throws BackendError with the reason why it never will.
  void wait_until_ready();

  bool is_up();
  bool is_idle() { return live_.is_empty(); }
  bool was_asked() const { return was_asked_; }
  size_t num_requests() { return live_.size(); }
  // When the newest of its requests of this client's id, as a hash, was received; 0 if it has none.
  uint64_t newest_of(uint64_t id_hash) { return live_.newest_of(id_hash); }
  bool is_replica_of(const Engine& other) const {
    return setup_.siblings != nullptr && setup_.siblings == other.setup_.siblings;
  }
  // What the engine itself says in its metrics.
  bool is_asleep() const { return reports_.sleep_level > 0; }
  size_t num_cached_tokens() const { return reports_.num_cached_tokens(); }
  bool is_of_model(const Engine& other) const {
    return setup_.model_name == other.setup_.model_name && setup_.model_version == other.setup_.model_version;
  }
  bool is_of_other_version(const Engine& other) const {
    return setup_.model_name == other.setup_.model_name && setup_.model_version != other.setup_.model_version;
  }
  // Why requests cannot be taken now; for error messages to clients.
  std::string why_down();

  // Hand a request over, in two halves.  First it is among the live requests: returns the connection that its frame is
  // for; null, and nothing is taken, while the engine is down.  Throws BackendError, and nothing is taken, while the
  // engine has too many requests or too much unread.
  std::shared_ptr<EngineLink> take(uint64_t handle, const OpenRequest& request);
  // False if it was answered meanwhile.
  bool give_back(uint64_t handle) { return live_.take_back(handle); }
  // Then its frame goes to the engine.  Throws, and the request is given back, only without memory.
  void pass_on(EngineLink& link, uint64_t handle, std::string_view frame);

  // Answer a request that was not taken, and close it.
  void refuse(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& reason);

  // Have the engine stop working on a request, as if its client had cancelled.  False if it is not live here.
  // Does not wait: the caller holds the lock of all engines, and this one may not be reading its socket.
  bool cancel(uint64_t handle) { return live_.mark_cancelled(handle); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kStarting, kUp, kDown, kFailed };

  void start_threads();
  void supervise();
  void run_engine();
  void serve(EngineProcess& process, EngineLink& link);
  // Its connection has ended, and nobody reads what is sent: requests go to another replica or are refused, while the
  // process still gives its memory back.
  void take_no_more() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(link_, nullptr) == nullptr) return;  // it was still loading
      state_ = State::kDown;
      end_for_clients_ = "has ended";
    }
    metrics_->engine_is_down();
  }
  // Whether its model ends, or another engine serves in its place.
  bool is_superseded() { return stop_ || services_.engines.has_successor(this); }
  bool keep_house();
  bool is_given_up();
  void give_up(EngineProcess& process, bool is_connected);
  void throw_if_exiting();
  void begin_drain();
  void answer_overdue();
  void report_silence();
  void stop_process(EngineProcess& process, bool is_connected);
  void on_frame(FrameType type, std::string_view payload);
  void on_responses(std::string_view payload);
  void on_ready(std::string_view payload);
  void engine_ended(const BackendError& reason, const std::string& for_clients);
  bool wait_for_restart();
  void watch_cancellations();
  void send_cancel(uint64_t handle);

  const EngineSetup setup_;
  const std::string name_;
  Services& services_;
  const std::shared_ptr<ServerExit> exit_;  // of the server
  EngineReports reports_;
  std::shared_ptr<ModelMetrics> metrics_;
  LiveRequests live_;
  HeldModel held_;  // of the supervisor thread
  std::atomic<bool> was_asked_{false};  // it was handed a request

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  State state_ = State::kStarting;
  TRITONSERVER_Error_Code end_code_ = TRITONSERVER_ERROR_INTERNAL;
  std::string end_reason_, end_for_clients_;
  std::shared_ptr<EngineLink> link_;  // only while up
  Clock::time_point drain_deadline_{};  // unset until the model or the server ends
  bool is_given_up_ = false;  // its model is unloaded, and the server holds it all the same

  std::atomic<bool> stop_{false};
  // of the supervisor thread
  std::shared_ptr<EngineLink> current_link_;
  std::vector<OutputSpec> outputs_;
  ResponseView response_;
  bool was_ever_up_ = false;
  bool is_drained_ = false;
  bool is_silence_reported_ = false;
  Clock::time_point silent_since_{};  // its last frame, or the last time that it had nothing to do
  Clock::time_point up_since_{};
  Backoff backoff_;

  std::thread supervisor_;
  std::thread watcher_;
};

}  // namespace slipstream
