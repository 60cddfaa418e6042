#include "live_requests.h"

#include <algorithm>
#include <thread>

#include "status.h"

namespace slipstream {
namespace {

constexpr auto kShortestWatchPeriod = std::chrono::microseconds(5000);
constexpr auto kLongestWatchPeriod = std::chrono::microseconds(50000);
constexpr auto kWatchCost = std::chrono::microseconds(50);  // of the period per request: at most 20 000 looks a second
constexpr size_t kWatchSlice = 32;                          // looks per hold of the lock that the reader needs
constexpr auto kCancelGrace = std::chrono::seconds(5);

// Copy the engine's tensors into a new response and send it.  False when an error went out instead, or nothing.
bool send_content(
    TRITONBACKEND_ResponseFactory* factory, const ResponseView& response, const std::vector<OutputSpec>& outputs) {
  TRITONBACKEND_Response* message = nullptr;
  if (!log_if_failed(TRITONBACKEND_ResponseNewFromFactory(&message, factory), "cannot make a response")) return false;
  TRITONSERVER_Error* error = nullptr;
  for (const ResponseView::Output& output : response.outputs) {
    const OutputSpec& spec = outputs[output.index];
    TRITONBACKEND_Output* tensor = nullptr;
    error = TRITONBACKEND_ResponseOutput(
        message, &tensor, spec.name.c_str(), static_cast<TRITONSERVER_DataType>(spec.dtype), output.shape, output.rank);
    if (error != nullptr) break;
    void* buffer = nullptr;
    TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    error = TRITONBACKEND_OutputBuffer(tensor, &buffer, output.data.size(), &memory_type, &memory_id);
    if (error == nullptr && memory_type == TRITONSERVER_MEMORY_GPU) {
      error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, "outputs in GPU memory are not supported");
    }
    if (error != nullptr) break;
    if (!output.data.empty()) std::memcpy(buffer, output.data.data(), output.data.size());
  }
  const uint32_t flags = response.is_final() ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0;
  const bool is_sent = log_if_failed(TRITONBACKEND_ResponseSend(message, flags, error), "cannot send a response");
  if (error == nullptr) return is_sent;
  TRITONSERVER_ErrorDelete(error);  // a client's own region for the tensor that is too small, say
  return false;
}

}  // namespace

void send_error(
    TRITONBACKEND_ResponseFactory* factory, TRITONSERVER_Error_Code code, const std::string& message, bool is_final) {
  TRITONBACKEND_Response* response = nullptr;
  if (!log_if_failed(TRITONBACKEND_ResponseNewFromFactory(&response, factory), "cannot make an error response")) return;
  const std::string told = message + " [" + code_name(code) + "]";
  TRITONSERVER_Error* error = TRITONSERVER_ErrorNew(code, told.c_str());
  const uint32_t flags = is_final ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0;
  log_if_failed(TRITONBACKEND_ResponseSend(response, flags, error), "cannot send an error response");
  TRITONSERVER_ErrorDelete(error);
}

void LiveRequests::add(uint64_t handle, const OpenRequest& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t num_spare = request.is_command ? kMostSpareCommands : 0;
  if (live_.size() >= most_requests_ && live_.size() - most_requests_ >= num_spare) {
    const std::string told = std::to_string(live_.size()) + " requests of the model are not answered yet, accepted: ";
    throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, told + "no more, by max_num_seqs and max_waiting_requests");
  }
  if (!live_.emplace(handle, Live{request}).second) {
    throw BackendError(TRITONSERVER_ERROR_INTERNAL, "two requests drew the same handle; send this one again");
  }
  if (live_.size() == 1) changed_.notify_one();
}

std::optional<OpenRequest> LiveRequests::find(uint64_t handle, bool remove) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(handle);
  if (found == live_.end()) return std::nullopt;
  const OpenRequest request = found->second.request;
  if (remove) live_.erase(found);
  return request;
}

void LiveRequests::respond(const ResponseView& response, const std::vector<OutputSpec>& outputs) {
  for (const ResponseView::Output& output : response.outputs) {
    if (output.index >= outputs.size()) throw ProtocolError("an output index is out of range");
  }
  auto request = find(response.handle, false);
  if (!request) return;
  if (request->feeds_step && is_exiting_()) return fail_steps();
  if (response.is_final()) request = find(response.handle, true);
  if (!request) return;
  if (request->broadcast != nullptr && !is_broadcast_over(*request, response)) return;
  const uint64_t answered_ns = response.is_final() ? monotonic_ns() : 0;
  const bool is_error = (response.flags & kFlagError) != 0;
  bool is_success = !is_error;
  pacer_.before_send();
  if (is_error) {
    const auto code = static_cast<TRITONSERVER_Error_Code>(response.error_code);
    send_error(request->factory, code, std::string(response.error_message), response.is_final());
  } else if ((response.flags & kFlagEmpty) == 0) {
    is_success = send_content(request->factory, response, outputs);
  } else if (response.is_final()) {
    log_if_failed(
        TRITONBACKEND_ResponseFactorySendFlags(request->factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL),
        "cannot end a request");
  }
  if (response.is_final()) request->close(is_success, answered_ns);
}

// Whether this response is the answer to a request that other replicas have as well.  An error is answered here.
bool LiveRequests::is_broadcast_over(const OpenRequest& request, const ResponseView& response) {
  if ((response.flags & kFlagError) != 0) {
    fail(request, static_cast<TRITONSERVER_Error_Code>(response.error_code), std::string(response.error_message));
    return false;
  }
  if (!response.is_final() || !request.broadcast->settle()) return false;
  const auto& error = request.broadcast->error();
  if (error) fail_now(request, error->code, error->what());
  return !error;
}

void LiveRequests::fail(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& message) {
  if (request.broadcast == nullptr) return fail_now(request, code, message);
  if (!request.broadcast->settle(code, message)) return;
  fail_now(request, request.broadcast->error()->code, request.broadcast->error()->what());
}

void LiveRequests::fail_now(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& message) {
  const uint64_t answered_ns = monotonic_ns();
  pacer_.before_send();
  send_error(request.factory, code, message);
  request.close(false, answered_ns);
}

size_t LiveRequests::fail_all(TRITONSERVER_Error_Code code, const std::string& message) {
  std::unordered_map<uint64_t, Live> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failed.swap(live_);
  }
  for (const auto& [handle, live] : failed) fail(live.request, code, message);
  return failed.size();
}

void LiveRequests::fail_steps() {
  std::vector<OpenRequest> steps;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = live_.begin(); it != live_.end();) {
      const bool is_step = it->second.request.feeds_step;
      if (is_step) steps.push_back(it->second.request);
      if (is_step) marked_.push_back(it->first);
      it = is_step ? live_.erase(it) : std::next(it);
    }
  }
  changed_.notify_all();
  for (const OpenRequest& step : steps) {
    fail(step, TRITONSERVER_ERROR_UNAVAILABLE, "the server is shutting down, and its ensembles cannot go on");
  }
}

void LiveRequests::fail_ignored_cancels() {
  std::vector<OpenRequest> ignored;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = live_.begin(); it != live_.end();) {
      const bool is_ignored = it->second.is_cancelled && Clock::now() - it->second.cancelled_at > kCancelGrace;
      if (is_ignored) ignored.push_back(it->second.request);
      it = is_ignored ? live_.erase(it) : std::next(it);
    }
  }
  if (!ignored.empty()) {  // one line: a client may cancel thousands at a time
    const std::string count = std::to_string(ignored.size());
    log_warning("the engine did not answer a cancellation within 5 s, of " + count + " requests");
  }
  for (const OpenRequest& request : ignored) {
    fail(request, TRITONSERVER_ERROR_CANCELLED, "cancelled; the engine did not confirm it");
  }
}

bool LiveRequests::wait_cancelled(std::vector<uint64_t>& cancelled) {
  cancelled.clear();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !live_.empty() || !marked_.empty() || !watching_; });
  const auto period = std::clamp<std::chrono::microseconds>(
      kWatchCost * static_cast<int64_t>(live_.size()), kShortestWatchPeriod, kLongestWatchPeriod);
  changed_.wait_for(lock, period, [this] { return !watching_ || !marked_.empty(); });
  cancelled.swap(marked_);
  watched_.clear();
  for (const auto& [handle, live] : live_) {
    if (!live.is_cancelled) watched_.push_back(handle);
  }
  for (size_t i = 0; i < watched_.size() && watching_; ++i) {
    if (i % kWatchSlice == kWatchSlice - 1) {  // let the reader in
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    if (is_newly_cancelled(watched_[i])) cancelled.push_back(watched_[i]);
  }
  return watching_;
}

// Under the lock.
bool LiveRequests::is_newly_cancelled(uint64_t handle) {
  const auto found = live_.find(handle);
  if (found == live_.end() || found->second.is_cancelled) return false;
  bool is_cancelled = false;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ResponseFactoryIsCancelled(found->second.request.factory, &is_cancelled)) {
    TRITONSERVER_ErrorDelete(error);
  }
  if (!is_cancelled) return false;
  found->second.is_cancelled = true;
  found->second.cancelled_at = Clock::now();
  return true;
}

size_t LiveRequests::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return live_.size();
}

uint64_t LiveRequests::newest_of(uint64_t id_hash) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t newest = 0;
  for (const auto& [handle, live] : live_) {
    if (live.request.id_hash == id_hash) newest = std::max(newest, live.request.received_ns);
  }
  return newest;
}

bool LiveRequests::mark_cancelled(uint64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(handle);
  if (found == live_.end() || found->second.is_cancelled) return false;
  found->second.is_cancelled = true;
  found->second.cancelled_at = Clock::now();
  marked_.push_back(handle);
  changed_.notify_all();
  return true;
}

void LiveRequests::stop_watching() {
  std::lock_guard<std::mutex> lock(mutex_);
  watching_ = false;
  changed_.notify_all();
}

}  // namespace slipstream
