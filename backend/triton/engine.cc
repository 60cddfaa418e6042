#include "engine.h"

#include <algorithm>

namespace slipstream {
namespace {

constexpr auto kDrainGrace = std::chrono::seconds(2);  // beyond the deadline the engine was given
constexpr int kTerminateGraceMs = 2000;
constexpr int kExitGraceMs = 5000;  // between closing its socket and ending, to see how it ended
constexpr int kExitStepMs = 100;
constexpr int kHousekeepingMs = 500;
constexpr auto kLongestSilence = std::chrono::seconds(60);  // a working engine sends metrics four times a second

}  // namespace

// The engine is gone.  what() is for the log and for whoever loads the model, for_clients for everybody else.
class EngineEnded : public BackendError {
 public:
  EngineEnded(const std::string& message, const std::string& for_clients)
      : BackendError(TRITONSERVER_ERROR_INTERNAL, message), for_clients(for_clients) {}
  explicit EngineEnded(const ProcessEnd& end)
      : EngineEnded("the engine process " + end.for_operator(), end.how) {}
  const std::string for_clients;
};

Engine::Engine(EngineSetup setup, Services& services)
    : setup_(std::move(setup)),
      name_(setup_.name()),
      services_(services),
      exit_(std::make_shared<ServerExit>(setup_.server)),
      metrics_(std::make_shared<ModelMetrics>(services.metrics, setup_.labels(), reports_)),
      live_(services.pacer, [exit = exit_] { return exit->has_begun(); }, setup_.most_requests),
      held_(exit_, setup_.model_name, setup_.model_version, setup_.drain_timeout) {
  if (setup_.replica == 0) exit_->warn_if_short(setup_.model_name, setup_.drain_timeout);
  services_.exit_guard.watch(exit_, [&engines = services_.engines] { return engines.is_idle(); });
  start_threads();
  services_.engines.add(this);
}

// Both, or none and the load fails.
void Engine::start_threads() {
  try {
    watcher_ = named_thread("slip-watcher", [this] { watch_cancellations(); });
    supervisor_ = named_thread("slip-supervisor", [this] { supervise(); });
  } catch (const std::system_error&) {
    live_.stop_watching();
    if (watcher_.joinable()) watcher_.join();
    throw;
  }
}

Engine::~Engine() {
  begin_end();
  services_.engines.remove(this);
  supervisor_.join();
  live_.fail_all(TRITONSERVER_ERROR_UNAVAILABLE, "model '" + setup_.model_name + "' is being unloaded");
  live_.stop_watching();
  watcher_.join();
}

void Engine::begin_end() {
  if (stop_) return;
  std::shared_ptr<EngineLink> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    begin_drain();
    stop_ = true;
    link = link_;
  }
  changed_.notify_all();
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(drain_deadline_ - Clock::now()).count();
  FrameWriter writer;
  if (link != nullptr) link->send(encode_drain(writer, static_cast<uint32_t>(std::clamp(left, 0L, long(UINT32_MAX)))));
}

void Engine::wait_until_ready() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return state_ != State::kStarting; });
  if (state_ == State::kFailed) throw BackendError(end_code_, end_reason_);
}

bool Engine::is_up() {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kUp;
}

std::string Engine::why_down() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_given_up_) return "the model is unloaded";
  const bool is_last = exit_->has_begun();
  const char* what_now = is_last ? "; the server is shutting down" : "; it is being restarted";
  return name_ + " " + end_for_clients_ + what_now;
}

std::shared_ptr<EngineLink> Engine::take(uint64_t handle, const OpenRequest& request) {
  std::lock_guard<std::mutex> lock(mutex_);  // with engine_ended(): no request slips in behind its fail_all()
  if (link_ == nullptr) return nullptr;
  if (!request.is_command && link_->is_behind()) {  // commands are short and few: they are kept all the same
    throw BackendError(
        TRITONSERVER_ERROR_UNAVAILABLE,
        name_ + " does not keep up with its requests: more than " + std::to_string(EngineLink::kMaxUnreadBytes >> 20) + " MiB of them are unread");
  }
  live_.add(handle, request);
  was_asked_ = true;
  return link_;
}

void Engine::pass_on(EngineLink& link, uint64_t handle, std::string_view frame) {
  try {
    link.send(frame);
  } catch (const std::exception&) {
    if (live_.take_back(handle)) throw;  // else it was answered meanwhile: its engine has ended
  }
}

void Engine::refuse(const OpenRequest& request, TRITONSERVER_Error_Code code, const std::string& reason) {
  services_.pacer.before_send();
  send_error(request.factory, code, reason);
  request.close(false, request.passed_ns);
}

void Engine::send_cancel(uint64_t handle) {
  std::shared_ptr<EngineLink> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    link = link_;
  }
  FrameWriter writer;
  if (link != nullptr) link->send(encode_cancel(writer, handle));
}

void Engine::watch_cancellations() {
  std::vector<uint64_t> cancelled;
  while (live_.wait_cancelled(cancelled)) {
    for (const uint64_t handle : cancelled) send_cancel(handle);
  }
}

// The supervisor's thread.  The watcher ends with it: the server may hold the instance for good, its threads it may not.
void Engine::supervise() {
  while (!stop_) {
    try {
      run_engine();
      break;  // stopped in good order
    } catch (const EngineEnded& error) {
      engine_ended(error, error.for_clients);
    } catch (const BackendError& error) {
      engine_ended(error, "could not be started");
    } catch (const std::exception& error) {
      engine_ended(BackendError(TRITONSERVER_ERROR_INTERNAL, error.what()), "could not be started");
    }
    if (!was_ever_up_ || !wait_for_restart()) break;
  }
  live_.stop_watching();
}

// One life of the engine process; returns when it was asked to stop.  Throws BackendError when it died.
void Engine::run_engine() {
  auto listener = std::make_unique<EngineListener>();
  EngineProcess process(
      {setup_.launcher, "--socket", listener->path(), "--token", listener->token_hex()}, setup_.log_prefix());
  const int fd = listener->accept_engine([&] {
    throw_if_exiting();
    return !stop_ && !process.has_exited();
  });
  if (fd < 0 && stop_) return;
  if (fd < 0) throw EngineEnded(process.describe_end());
  listener.reset();  // no stranger can connect any more
  current_link_ = std::make_shared<EngineLink>(fd);
  FrameWriter writer;
  current_link_->send(
      encode_config(writer, setup_.model_name, setup_.model_version, setup_.model_dir, setup_.config_json));
  is_drained_ = false;
  serve(process, *current_link_);
}

void Engine::serve(EngineProcess& process, EngineLink& link) {
  const auto handler = [this](FrameType type, std::string_view payload) { on_frame(type, payload); };
  auto next_housekeeping = Clock::now();
  bool is_open = true;
  try {
    while (is_open && !is_drained_) {
      is_open = link.receive(kHousekeepingMs, handler);
      if (Clock::now() < next_housekeeping) continue;
      next_housekeeping = Clock::now() + std::chrono::milliseconds(kHousekeepingMs);
      if (!keep_house()) break;
    }
  } catch (const ProtocolError& error) {
    process.kill();
    const std::string how = std::string("sent an invalid frame (") + error.what() + ") and was killed";
    throw EngineEnded("the engine " + how, how);
  }
  if (is_given_up_) return give_up(process, is_open);
  if (stop_) return stop_process(process, is_open);
  if (is_open) {  // the server exits and has not unloaded the model in time: it may never do so
    stop_process(process, is_open);
    throw EngineEnded("the engine was stopped: the server is shutting down", "was stopped");
  }
  take_no_more();
  for (int waited = 0; waited < kExitGraceMs && !stop_ && !process.wait_exit(kExitStepMs); waited += kExitStepMs) {
    answer_overdue();
  }
  throw EngineEnded(process.describe_end());
}

// Every half second.  False when the engine has had its time to drain, be it that the model ends or only the server: one
// that hangs in its own teardown unloads nothing, and its engines must give their memory back all the same.
bool Engine::keep_house() {
  live_.fail_ignored_cancels();
  if (current_link_ != link_) throw_if_exiting();  // still loading
  answer_overdue();
  report_silence();
  if (is_given_up()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_draining = drain_deadline_ != Clock::time_point{};
  return !is_draining || (link_ != nullptr && Clock::now() < drain_deadline_ + kDrainGrace);
}

// The model is unloaded, the server holds it for a stream or a lost cancel, and it has had no request for drain_timeout_s:
// from now on it takes none, so that its engine can end.
bool Engine::is_given_up() {
  if (link_ == nullptr || stop_ || !services_.engines.was_asked(this)) return false;
  const bool is_used = services_.engines.has_requests(this);
  if (is_used) held_.is_used();
  if (is_used || !held_.is_given_up(services_.engines.is_replaced(this))) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (drain_deadline_ != Clock::time_point{} || !live_.is_empty()) return false;
  link_ = nullptr;
  state_ = State::kDown;
  is_given_up_ = true;
  return true;
}

void Engine::give_up(EngineProcess& process, bool is_connected) {
  log_warning(
      "model '" + setup_.model_name + "' is unloaded, but the server holds it (a gRPC stream that is open, or a lost "
      "cancel): its engine is ended and gives its memory back");
  try {
    FrameWriter writer;
    current_link_->send(encode_drain(writer, 0));
    const auto handler = [this](FrameType type, std::string_view) {
      if (type == FrameType::kDrained) is_drained_ = true;
    };
    const auto deadline = Clock::now() + kDrainGrace;
    while (is_connected && !is_drained_ && Clock::now() < deadline) {
      is_connected = current_link_->receive(kHousekeepingMs, handler);
    }
  } catch (const ProtocolError& error) {
    log_warning(std::string("the engine sent an invalid frame at its end: ") + error.what());
  }
  stop_process(process, is_connected);
  current_link_ = nullptr;
  metrics_ = nullptr;  // an unloaded model has none, and another of its name may have the same
}

// A server that was told to end waits for its loads: one that takes minutes must not outlast the exit time-out.
void Engine::throw_if_exiting() {
  if (exit_->has_begun()) throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, "the server is shutting down");
}

// Under the lock.
void Engine::begin_drain() {
  if (drain_deadline_ != Clock::time_point{}) return;
  const bool is_limited = exit_->has_begun();
  const auto time = is_limited ? std::min(setup_.drain_timeout, exit_->longest_drain()) : setup_.drain_timeout;
  drain_deadline_ = Clock::now() + time;
}

// An engine may hang and still read its socket.  It is left alone: only its operator knows what killing it costs.
void Engine::report_silence() {
  if (link_ == nullptr || live_.is_empty()) silent_since_ = Clock::now();
  if (is_silence_reported_ || Clock::now() - silent_since_ < kLongestSilence) return;
  is_silence_reported_ = true;
  metrics_->engine_is_silent();
  log_error(name_ + " has requests and has sent nothing for 60 s: it hangs");
}

// A server that exits unloads no model before its requests have ended (server 2.51): so they get their time from the
// moment it exits, and what still runs then is answered here.  Before that DRAIN would be wrong: an ensemble's streams
// go on sending requests to the models at its end.
void Engine::answer_overdue() {
  if (!exit_->has_begun()) return;
  live_.fail_steps();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    begin_drain();
    if (Clock::now() < drain_deadline_) return;
  }
  const size_t num_overdue = live_.fail_all(
      TRITONSERVER_ERROR_UNAVAILABLE, "the server is shutting down and the request did not end within drain_timeout_s");
  if (num_overdue == 0) return;
  log_warning(
      "model '" + setup_.model_name + "': " + std::to_string(num_overdue) +
      " requests did not end within drain_timeout_s and were answered with an error");
}

void Engine::stop_process(EngineProcess& process, bool is_connected) {
  if ((is_drained_ || !is_connected) && process.wait_exit(kTerminateGraceMs)) return;  // it ends, or died meanwhile
  log_warning(name_ + " did not drain in time; terminating it");
  process.terminate();
  if (!process.wait_exit(kTerminateGraceMs)) process.kill();
}

void Engine::on_frame(FrameType type, std::string_view payload) {
  silent_since_ = Clock::now();
  is_silence_reported_ = false;
  const bool is_serving = link_ != nullptr;  // only this thread changes it
  if (type == FrameType::kLoadFailed && !is_serving) {
    throw BackendError(TRITONSERVER_ERROR_INVALID_ARG, std::string(PayloadReader(payload).text()));
  }
  if (type == FrameType::kReady && !is_serving) return on_ready(payload);
  if (type == FrameType::kResponses && is_serving) return on_responses(payload);
  if (type == FrameType::kMetrics && is_serving) return metrics_->record(payload);
  if (type == FrameType::kDrained && is_serving) {
    is_drained_ = true;
    return;
  }
  throw ProtocolError("a frame of type " + std::to_string(static_cast<int>(type)) + " out of turn");
}

void Engine::on_responses(std::string_view payload) {
  PayloadReader reader(payload);
  for (uint32_t left = reader.u32(); left > 0; --left) {
    decode_response(reader, response_);
    live_.respond(response_, outputs_);
  }
  reader.finish();
}

void Engine::on_ready(std::string_view payload) {
  ReadyFrame ready = decode_ready(payload);
  outputs_ = std::move(ready.outputs);
  metrics_->declare(ready.metrics);
  metrics_->engine_is_up();
  if (setup_.on_empty_cache) setup_.on_empty_cache();
  was_ever_up_ = true;
  up_since_ = Clock::now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    link_ = current_link_;
    state_ = State::kUp;
  }
  changed_.notify_all();
  log_info(name_ + " is up");
}

void Engine::engine_ended(const BackendError& reason, const std::string& for_clients) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    link_ = nullptr;
    end_code_ = reason.code;
    end_reason_ = reason.what();
    end_for_clients_ = for_clients;
    state_ = was_ever_up_ ? State::kDown : State::kFailed;
  }
  current_link_ = nullptr;
  metrics_->engine_is_down();
  changed_.notify_all();
  if (!was_ever_up_) return;  // the load fails and says why
  if (!is_superseded()) metrics_->engine_restarts();
  log_error((setup_.num_replicas > 1 ? name_ : "model '" + setup_.model_name + "'") + ": " + reason.what());
  live_.fail_all(TRITONSERVER_ERROR_UNAVAILABLE, why_down());
}

// False when the server exits, or the model is unloaded: by the reloader, which then loads it anew, or by the user.
bool Engine::wait_for_restart() {
  const auto healthy_for = up_since_ == Clock::time_point{} ? Clock::duration{} : Clock::now() - up_since_;
  up_since_ = {};
  if (is_superseded()) return false;
  const EngineSetup& own = setup_;
  const bool is_in_place = own.has_sent_files || services_.engines.serves_on(this);  // ready, by another engine
  const auto ticket = is_in_place ? nullptr
                                  : services_.reloader.reload(
                                        exit_, own.model_name, own.model_version, own.given, healthy_for, metrics_);
  const auto due = Clock::now() + backoff_.next(healthy_for);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ && !exit_->has_begun()) {
    const auto verdict = ticket == nullptr ? ModelReloader::Verdict::kRefused : ticket->load();
    if (verdict == ModelReloader::Verdict::kUnloading) return false;
    if (verdict == ModelReloader::Verdict::kRefused && Clock::now() >= due) return true;
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  return false;
}

}  // namespace slipstream
