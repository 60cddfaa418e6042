#include "server_exit.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

#include "command_line.h"
#include "status.h"

namespace slipstream {
namespace {

constexpr std::chrono::seconds kDefaultTimeout(30);  // of the server
constexpr std::chrono::milliseconds kReserve(8000);  // 0.5 s to notice, 2 + 2 s for an engine that hangs, unloading
constexpr std::chrono::seconds kQuietEnd(3);   // without a request, so that the last answers have been written
constexpr std::chrono::seconds kOverdueEnd(5);  // beyond the server's own limit
constexpr std::chrono::milliseconds kPeriod(500);

bool is_tritonserver() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  const std::string file(path, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return file.substr(file.rfind('/') + 1) == "tritonserver";
}

std::string in_seconds(std::chrono::milliseconds time) {
  char text[32];
  snprintf(text, sizeof text, "%g", static_cast<double>(time.count()) / 1e3);
  return text;
}

// The base address of the library that contains this address.
const void* base_of(const void* address) {
  Dl_info found{};
  return dladdr(address, &found) != 0 ? found.dli_fbase : nullptr;
}

// Not through Triton's log, whose lock may be held for ever by a thread that crashed.
[[noreturn]] void end_process(int status, const std::string& reason) {
  const std::string line = "slipstream: " + reason + "; ending it\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(status);
  _exit(status);
}

}  // namespace

ExitGuard::~ExitGuard() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ExitGuard::watch(std::shared_ptr<ServerExit> exit, std::function<bool()> is_idle) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (exit_ != nullptr || !is_tritonserver()) return;
  thread_ = named_thread("slip-exit", [this] { run(); });  // it waits for the lock; without threads nothing is watched
  exit_ = std::move(exit);
  is_idle_ = std::move(is_idle);
}

void ExitGuard::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::optional<Clock::time_point> begun;
  bool are_others_loaded = false;
  Clock::time_point busy_at{};
  while (!changed_.wait_for(lock, kPeriod, [this] { return stop_; })) {
    if (!exit_->has_begun()) continue;
    const Clock::time_point now = Clock::now();
    if (!begun) are_others_loaded = has_other_backends();
    if (!begun) begun = now;
    if (are_others_loaded || !is_idle_()) busy_at = now;
    if (now - std::max(busy_at, *begun) >= kQuietEnd) {
      end_process(0, "all requests are answered and the server waits for clients to close their gRPC streams");
    }
    if (now - *begun >= exit_->timeout() + kOverdueEnd) {
      end_process(1, "the server has not ended within --exit-timeout-secs and 5 s");
    }
  }
}

// An ensemble's code is the server's, and Python backends of any name run in libtriton_python.so.
bool has_other_backends() {
  std::vector<std::string> libraries;
  const auto note = [](dl_phdr_info* info, size_t, void* found) {
    if (info->dlpi_name != nullptr && info->dlpi_name[0] != '\0') {
      static_cast<std::vector<std::string>*>(found)->push_back(info->dlpi_name);
    }
    return 0;
  };
  dl_iterate_phdr(note, &libraries);
  const void* const ours = base_of(reinterpret_cast<const void*>(&has_other_backends));
  for (const std::string& path : libraries) {
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) continue;  // unloaded meanwhile
    const void* entry = dlsym(library, "TRITONBACKEND_ModelInstanceExecute");  // its own, or of a library that it needs
    dlclose(library);
    if (entry != nullptr && base_of(entry) != ours) return true;
  }
  return false;
}

bool ServerExit::has_begun() {
  if (has_begun_) return true;
  bool is_live = false;  // also false while the server starts; only once it exits this is an error
  TRITONSERVER_Error* error = TRITONSERVER_ServerIsLive(server_, &is_live);
  if (error == nullptr) return false;
  TRITONSERVER_ErrorDelete(error);
  has_begun_ = true;
  return true;
}

std::chrono::milliseconds ServerExit::longest_drain() const {
  const std::chrono::milliseconds timeout(timeout_);
  return timeout - std::min(kReserve, timeout / 2);
}

void ServerExit::warn_if_short(const std::string& model_name, std::chrono::milliseconds drain_timeout) const {
  if (drain_timeout <= longest_drain()) return;
  log_warning(
      "model '" + model_name + "': the server's --exit-timeout-secs is " + std::to_string(timeout_.count()) +
      ", so that requests have " + in_seconds(longest_drain()) + " s when it exits, not the " +
      in_seconds(drain_timeout) + " s of drain_timeout_s; set it at least 10 s above drain_timeout_s");
}

std::chrono::seconds ServerExit::read_timeout() {
  const auto given = option_of(read_command_line(), "exit-timeout-secs");
  return given ? std::chrono::seconds(std::max(0L, std::strtol(given->c_str(), nullptr, 10))) : kDefaultTimeout;
}

}  // namespace slipstream
