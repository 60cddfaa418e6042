// The end of the server: whether it has begun, and how long the server will wait for its requests and models.
//
// Server 2.51 that waits in vain (--exit-timeout-secs, 30 by default) crashes or hangs in its own teardown.  So nothing
// of this backend may run longer, whatever drain_timeout_s says.  Any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "api.h"

namespace slipstream {

class ServerExit {
 public:
  explicit ServerExit(TRITONSERVER_Server* server) : server_(server) {}

  // True from the first call that finds the server exiting; it is not asked again, as it may be deleted from then on.
  bool has_begun();

  // Not to be used once the exit has begun.
  TRITONSERVER_Server* server() const { return server_; }

  // What running requests can have from the moment that the server exits: its own limit, less what it takes to answer
  // them, to kill an engine that hangs and to unload the model.
  std::chrono::milliseconds longest_drain() const;
  // Log when that is less than a model's drain_timeout_s.
  void warn_if_short(const std::string& model_name, std::chrono::milliseconds drain_timeout) const;

  // --exit-timeout-secs of this process, or its default.
  std::chrono::seconds timeout() const { return timeout_; }

 private:
  TRITONSERVER_Server* const server_;
  const std::chrono::seconds timeout_ = read_timeout();
  std::atomic<bool> has_begun_{false};

  static std::chrono::seconds read_timeout();
};

// Ends a tritonserver that does not end.  Server 2.51 waits without any limit for clients to close their gRPC streams,
// idle ones included; before that it waits --exit-timeout-secs for the model of each such stream's first request, and of
// each request that was cancelled while its last response was being written, as these keep a reference on the model for
// good.  So the process is ended with status 0 when all requests have been answered for 3 s and only this backend's
// models (and ensembles) can be loaded, and with status 1 5 s after --exit-timeout-secs in any case.
// One thread, from the first model on; it does nothing in a process that has the server as a library.
class ExitGuard {
 public:
  ExitGuard() = default;
  ~ExitGuard();
  // is_idle says, at any time until the destructor, whether no request is live.
  void watch(std::shared_ptr<ServerExit> exit, std::function<bool()> is_idle);

 private:
  using Clock = std::chrono::steady_clock;
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::shared_ptr<ServerExit> exit_;
  std::function<bool()> is_idle_;
  std::thread thread_;
};

// Whether the library of another backend is in this process: its requests are seen by nobody here.  A backend is known by
// the function that Triton calls of it, whatever its file is called (`runtime` in config.pbtxt names any).
bool has_other_backends();

}  // namespace slipstream
