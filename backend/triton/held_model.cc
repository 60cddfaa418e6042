#include "held_model.h"

#include "json_splice.h"
#include "status.h"

namespace slipstream {
namespace {

bool is_ready(TRITONSERVER_Server* server, const std::string& name, uint64_t version) {
  bool is_ready = false;
  TRITONSERVER_Error* error =
      TRITONSERVER_ServerModelIsReady(server, name.c_str(), static_cast<int64_t>(version), &is_ready);
  if (error == nullptr) return is_ready;
  TRITONSERVER_ErrorDelete(error);
  return false;
}

// "READY", "LOADING", "UNLOADING", "UNAVAILABLE"; "" when the server does not say.
std::string state_of(TRITONSERVER_Server* server, const std::string& name, uint64_t version) {
  TRITONSERVER_Message* message;
  if (!log_if_failed(TRITONSERVER_ServerModelIndex(server, 0, &message), "model index")) return "";
  std::string state;
  try {
    const char* base;
    size_t size;
    check(TRITONSERVER_MessageSerializeToJson(message, &base, &size));
    for (const std::string_view entry : json_elements(std::string_view(base, size))) {
      const auto text = [entry](const char* key) {
        const auto raw = json_member(entry, key);
        return raw ? json_string(*raw) : std::string();
      };
      if (text("name") == name && text("version") == std::to_string(version)) state = text("state");
    }
  } catch (const std::runtime_error& error) {
    log_warning(std::string("model index: ") + error.what());
  }
  log_if_failed(TRITONSERVER_MessageDelete(message), "model index");
  return state;
}

}  // namespace

// The index is asked for only when the model is not ready: it reads the repository's folders.
bool is_unloaded(TRITONSERVER_Server* server, const std::string& name, uint64_t version) {
  if (is_ready(server, name, version)) return false;
  const std::string state = state_of(server, name, version);
  return state == "UNLOADING" || state == "UNAVAILABLE";
}

bool HeldModel::is_given_up(bool is_replaced) {
  if (exit_->has_begun()) return false;
  if (!is_replaced && !is_unloaded(exit_->server(), name_, version_)) {
    gone_since_.reset();
    return false;
  }
  if (!gone_since_) gone_since_ = Clock::now();
  return Clock::now() - *gone_since_ >= patience_;
}

}  // namespace slipstream
