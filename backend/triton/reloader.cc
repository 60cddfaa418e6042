#include "reloader.h"

#include <algorithm>

#include "json_splice.h"
#include "status.h"

namespace slipstream {
namespace {

// Whether a folder of this name is in the repositories; true also when the server does not say.
bool is_in_repository(TRITONSERVER_Server* server, const std::string& model) {
  TRITONSERVER_Message* message;
  const char* base;
  size_t size;
  if (!log_if_failed(TRITONSERVER_ServerModelIndex(server, 0, &message), "model index")) return true;
  bool is_found = true;
  try {
    check(TRITONSERVER_MessageSerializeToJson(message, &base, &size));
    const auto models = json_elements(std::string_view(base, size));
    is_found = std::any_of(models.begin(), models.end(), [&](std::string_view entry) {
      const auto name = json_member(entry, "name");
      return name && json_string(*name) == model;
    });
  } catch (const std::runtime_error& error) {
    log_warning(std::string("model index: ") + error.what());
  }
  log_if_failed(TRITONSERVER_MessageDelete(message), "model index");
  return is_found;
}

}  // namespace

constexpr std::chrono::seconds kHealthy(10);

using std::chrono::milliseconds;

std::chrono::milliseconds Backoff::next(Clock::duration healthy_for) {
  constexpr milliseconds kFirst(500), kLongest(30000);
  const bool was_healthy = healthy_for > kHealthy;
  delay_ = was_healthy || delay_ == milliseconds(0) ? kFirst : std::min(2 * delay_, kLongest);
  return delay_;
}

ModelReloader::~ModelReloader() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

ModelReloader::Ticket ModelReloader::reload(
    std::shared_ptr<ServerExit> exit, const std::string& model, std::chrono::steady_clock::duration healthy_for,
    std::shared_ptr<void> keep_alive) {
  if (is_in_place_) return nullptr;
  auto ticket = std::make_shared<std::atomic<Verdict>>(Verdict::kPending);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto due = std::chrono::steady_clock::now() + backoffs_[model].next(healthy_for);
  jobs_.push_back({std::move(exit), model, std::move(keep_alive), ticket, false, due});
  if (!thread_.joinable()) thread_ = named_thread("slip-reloader", [this] { run(); });
  changed_.notify_all();
  return ticket;
}

void ModelReloader::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const auto now = std::chrono::steady_clock::now();
    const auto ripe = std::find_if(jobs_.begin(), jobs_.end(), [now](const Job& job) {
      return !job.is_unloaded || job.due <= now || job.exit->has_begun();
    });
    if (ripe == jobs_.end()) {
      changed_.wait_for(lock, jobs_.empty() ? milliseconds(3600000) : milliseconds(100));
      continue;
    }
    Job job = std::move(*ripe);
    jobs_.erase(ripe);
    lock.unlock();
    advance(job);
    lock.lock();
    if (job.ticket != nullptr) jobs_.push_back(std::move(job));
  }
}

// Unload, or load; a finished job gives its ticket up.  An unload by somebody else changes nothing that the server would
// tell (its state and reason are those of our own unload), but a folder that was taken away does.
void ModelReloader::advance(Job& job) {
  if (job.exit->has_begun()) {
    *job.ticket = Verdict::kRefused;
    job.ticket = nullptr;
    return;
  }
  if (!job.is_unloaded) {
    if (!unload(job)) job.ticket = nullptr;
    return;
  }
  if (!is_in_repository(job.exit->server(), job.model)) {
    log_warning("model " + job.model + " is not in the repository any more and is not loaded again");
    job.ticket = nullptr;
    return;
  }
  TRITONSERVER_Error* error = TRITONSERVER_ServerLoadModel(job.exit->server(), job.model.c_str());
  if (error == nullptr) {
    log_info("model " + job.model + " is loaded again");
    job.ticket = nullptr;
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const milliseconds delay = backoffs_[job.model].next(milliseconds(0));
  log_error(
      "model " + job.model + " could not be loaded again, next try in " + std::to_string(delay.count()) +
      " ms: " + TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  job.due = std::chrono::steady_clock::now() + delay;
}

bool ModelReloader::unload(Job& job) {
  TRITONSERVER_Error* error = TRITONSERVER_ServerUnloadModel(job.exit->server(), job.model.c_str());
  if (error == nullptr) {
    log_warning("model " + job.model + " is unloaded until its engine works again");
    job.is_unloaded = true;
    *job.ticket = Verdict::kUnloading;
    return true;
  }
  log_warning(
      "model " + job.model + ": its engine restarts in place and its ready endpoint does not show it: " +
      TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);  // says nothing of other models, or of the next time: in explicit mode it may be passing
  *job.ticket = Verdict::kRefused;
  return false;
}

}  // namespace slipstream
