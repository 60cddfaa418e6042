// The requests that the engine has and that have not seen their last response.
//
// execute() adds (Triton's threads); the engine's reader thread sends responses, and it alone removes; the watcher
// thread looks for cancelled ones.  A request and its factory are touched without the lock by the reader thread only.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "api.h"
#include "open_request.h"
#include "pacing.h"
#include "wire.h"

namespace slipstream {

constexpr size_t kMostSpareCommands = 256;  // that an engine may have not answered beyond its requests

class LiveRequests {
 public:
  // is_exiting: whether the server has begun to end.
  explicit LiveRequests(
      HttpPacer& pacer, std::function<bool()> is_exiting = [] { return false; }, size_t most_requests = SIZE_MAX)
      : pacer_(pacer), is_exiting_(std::move(is_exiting)), most_requests_(most_requests) {}

  // Takes the request over, unless it throws BackendError because the handle is in use, or there are too many.  Commands,
  // which may end the others, have kMostSpareCommands places more.
  void add(uint64_t handle, const OpenRequest& request);

  // Give a request that the engine never got back to the caller.  False if it was answered meanwhile.
  bool take_back(uint64_t handle) { return find(handle, true).has_value(); }

  // Reader thread: send one response of the engine; outputs are named by READY's list.  Unknown handles are ignored
  // (their request was answered already).  Throws ProtocolError for an output index out of range.
  void respond(const ResponseView& response, const std::vector<OutputSpec>& outputs);

  // Reader thread: answer every request with this error.  Returns how many there were.
  size_t fail_all(TRITONSERVER_Error_Code code, const std::string& message);

  // Reader thread, when the server ends: answer those whose responses feed the next step of an ensemble, and have the
  // engine end them.  From then on the server (2.51) takes no steps, and an ensemble of which it refuses one is silent
  // until the process ends: only an error of a step that runs ends it.
  void fail_steps();

  // Reader thread: answer those whose cancellation the engine has ignored for 5 s.
  void fail_ignored_cancels();

  // Watcher thread: wait 5 to 50 ms, longer for more requests (and as long as there is none at all), and find those that
  // are newly cancelled.  False after stop_watching().
  bool wait_cancelled(std::vector<uint64_t>& cancelled);
  void stop_watching();

  bool is_empty() { return size() == 0; }
  size_t size();
  // When the newest request of this client's id, as a hash, was received; 0 if there is none.
  uint64_t newest_of(uint64_t id_hash);

  // Mark as cancelled whatever the client says; the watcher finds it next.  Never waits for an engine.  False if it is not
  // live or was marked before.
  bool mark_cancelled(uint64_t handle);

 private:
  using Clock = std::chrono::steady_clock;
  struct Live {
    OpenRequest request;
    bool is_cancelled = false;
    Clock::time_point cancelled_at{};
  };

  bool is_newly_cancelled(uint64_t handle);
  std::optional<OpenRequest> find(uint64_t handle, bool remove);
  void fail(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& message);
  void fail_now(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& message);
  bool is_broadcast_over(const OpenRequest& request, const ResponseView& response);

  HttpPacer& pacer_;
  const std::function<bool()> is_exiting_;
  const size_t most_requests_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool watching_ = true;
  std::unordered_map<uint64_t, Live> live_;
  std::vector<uint64_t> marked_;  // by mark_cancelled() and fail_steps(), not yet found
  std::vector<uint64_t> watched_;  // of the watcher thread
};

// Answer with an error, whose text then ends with its code.
void send_error(
    TRITONBACKEND_ResponseFactory* factory, TRITONSERVER_Error_Code code, const std::string& message,
    bool is_final = true);

}  // namespace slipstream
