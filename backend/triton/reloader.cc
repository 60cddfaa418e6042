#include "reloader.h"

#include <algorithm>
#include <system_error>

#include "held_model.h"
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
  for (Worker& worker : workers_) worker.thread.join();
}

ModelReloader::Ticket ModelReloader::reload(
    std::shared_ptr<ServerExit> exit, const std::string& model, uint64_t version, const GivenConfig& given,
    std::chrono::steady_clock::duration healthy_for, std::shared_ptr<void> keep_alive) {
  if (is_in_place_) return nullptr;
  auto ticket = std::make_shared<std::atomic<Verdict>>(Verdict::kPending);
  std::lock_guard<std::mutex> lock(mutex_);
  join_done();
  const auto due = std::chrono::steady_clock::now() + backoffs_[model].next(healthy_for);
  auto job = std::make_shared<Job>(Job{std::move(exit), model, version, given, std::move(keep_alive), ticket, due});
  Worker& worker = workers_.emplace_back();
  try {
    worker.thread = named_thread("slip-reloader", [this, job, &worker] {
      run(*job);
      job->keep_alive = nullptr;
      worker.is_done = true;
    });
  } catch (const std::system_error& error) {  // no more threads: in place, then
    log_warning(std::string("a model cannot be unloaded until its engine works again: ") + error.what());
    workers_.pop_back();
    *ticket = Verdict::kRefused;
  }
  return ticket;
}

// Under the lock.
void ModelReloader::join_done() {
  workers_.remove_if([](Worker& worker) {
    if (!worker.is_done) return false;
    worker.thread.join();
    return true;
  });
}

void ModelReloader::run(Job& job) {
  if (!unload(job)) return;
  while (wait_until_due(job)) {
    if (load(job)) return;
  }
}

bool ModelReloader::unload(const Job& job) {
  std::lock_guard<std::mutex> lock(unload_mutex_);
  if (job.exit->has_begun()) {
    *job.ticket = Verdict::kRefused;
    return false;
  }
  if (is_unloaded(job.exit->server(), job.model, job.version)) {
    log_info("model " + job.model + " is unloaded already and is not loaded again");
    *job.ticket = Verdict::kUnloading;
    return false;
  }
  TRITONSERVER_Error* error = TRITONSERVER_ServerUnloadModel(job.exit->server(), job.model.c_str());
  if (error == nullptr) {
    log_warning("model " + job.model + " is unloaded until its engine works again");
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

// False when the server exits, or the backend ends.
bool ModelReloader::wait_until_due(const Job& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ && !job.exit->has_begun()) {
    if (std::chrono::steady_clock::now() >= job.due) return true;
    changed_.wait_for(lock, milliseconds(100));
  }
  return false;
}

// False when it is to be tried again.  An unload by somebody else meanwhile changes nothing that the server would tell
// (its state and reason are those of our own unload), but a folder that was taken away does.
bool ModelReloader::load(Job& job) {
  if (!is_in_repository(job.exit->server(), job.model)) {
    log_warning("model " + job.model + " is not in the repository any more and is not loaded again");
    return true;
  }
  TRITONSERVER_Error* error = load_as_given(job);
  if (error == nullptr) {
    log_info("model " + job.model + " is loaded again");
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const milliseconds delay = backoffs_[job.model].next(milliseconds(0));
  log_error(
      "model " + job.model + " could not be loaded again, next try in " + std::to_string(delay.count()) +
      " ms: " + TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  job.due = std::chrono::steady_clock::now() + delay;
  return false;
}

void ModelReloader::check_load(const std::string& model, const GivenConfig& by_file) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto load = loads_.find(model);
  if (load == loads_.end() || !load->second.given->is_overridden(by_file)) return;
  load->second.is_overridden = true;
  throw BackendError(
      TRITONSERVER_ERROR_UNAVAILABLE, "it was loaded with another config than config.pbtxt, and is again in a moment");
}

// The server does not tell whether a load request had a config of its own.  So the file's is tried first: what differs
// from what the model had is not the file's, or the file has changed and counts.
TRITONSERVER_Error* ModelReloader::load_as_given(const Job& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    loads_[job.model] = Load{&job.given};
  }
  TRITONSERVER_Error* error = TRITONSERVER_ServerLoadModel(job.exit->server(), job.model.c_str());
  bool is_overridden;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_overridden = loads_[job.model].is_overridden;
    loads_.erase(job.model);
  }
  if (error == nullptr || !is_overridden) return error;
  TRITONSERVER_ErrorDelete(error);
  log_info("model " + job.model + " is loaded again with the config of its load request");
  TRITONSERVER_Parameter* parameter =
      TRITONSERVER_ParameterNew("config", TRITONSERVER_PARAMETER_STRING, job.given.json.c_str());
  const TRITONSERVER_Parameter* parameters[] = {parameter};
  error = TRITONSERVER_ServerLoadModelWithParameters(job.exit->server(), job.model.c_str(), parameters, 1);
  TRITONSERVER_ParameterDelete(parameter);
  return error;
}

}  // namespace slipstream
