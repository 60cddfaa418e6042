#include "replicas.h"

#include <algorithm>

#include "json_splice.h"
#include "request.h"
#include "status.h"

namespace slipstream {
namespace {

constexpr size_t kBlockTokens = kBlockBytes / sizeof(int32_t);  // what a block of text holds as well, about

EngineSetup setup_of(EngineSetup setup, int replica, int num_replicas) {
  if (num_replicas == 1) return setup;
  setup.replica = replica;
  setup.num_replicas = num_replicas;
  setup.config_json = json_with_member(setup.config_json, "replica", std::to_string(replica));
  return setup;
}

}  // namespace

Replicas::Replicas(const EngineSetup& setup, int num_replicas, size_t load_slack, Services& services)
    : router_(static_cast<size_t>(num_replicas), load_slack) {
  for (int i = 0; i < num_replicas; ++i) {
    EngineSetup own = setup_of(setup, i, num_replicas);
    if (num_replicas > 1) own.siblings = this;
    own.on_empty_cache = [this, i] { router_.forget(static_cast<size_t>(i)); };
    engines_.push_back(std::make_unique<Engine>(std::move(own), services));
  }
}

Replicas::~Replicas() {
  for (const auto& engine : engines_) engine->begin_end();
}

void Replicas::wait_until_ready() {
  for (const auto& engine : engines_) engine->wait_until_ready();
}

bool Replicas::is_up() {
  return std::any_of(engines_.begin(), engines_.end(), [](const auto& engine) { return engine->is_up(); });
}

std::string Replicas::why_down() {
  for (const auto& engine : engines_) {
    if (!engine->is_up()) return engine->why_down();
  }
  return "the model has just come back; send the request again";
}

void Replicas::submit(FrameWriter& writer, OpenRequest& open) {
  const uint64_t handle = new_handle();
  const std::string_view frame = encode_request(writer, handle, open.request);
  open.feeds_step = feeds_step(open.request);
  open.passed_ns = monotonic_ns();
  if (engines_.size() == 1) {
    const auto link = engines_.front()->take(handle, open);
    if (link == nullptr) throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, why_down());
    return engines_.front()->pass_on(*link, handle, frame);
  }
  const RoutedRequest routed = read_routing(open.request);
  if (routed.is_control) return submit_to_all(writer, open, routed.empties_caches);
  open.id_hash = routed.is_stop ? 0 : routed.id_hash;
  submit_to_best(frame, handle, open, routed);
}

void Replicas::submit_to_best(
    std::string_view frame, uint64_t handle, const OpenRequest& open, const RoutedRequest& routed) {
  std::optional<BackendError> refusal;
  for (const size_t i : rank(routed)) {
    std::shared_ptr<EngineLink> link;
    try {
      link = engines_[i]->take(handle, open);
    } catch (const BackendError& error) {  // it does not keep up: another one may
      if (!refusal) refusal.emplace(error);
      if (routed.is_stop) break;  // no other has the request that it ends
    }
    if (link == nullptr) continue;
    router_.was_sent(i, routed.prompt, capacity_of(i));
    return engines_[i]->pass_on(*link, handle, frame);
  }
  if (refusal) throw BackendError(*refusal);
  throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, why_down());
}

// The best first; to end a request, the one that has the newest of that id.
std::vector<size_t> Replicas::rank(const RoutedRequest& routed) {
  std::vector<ReplicaLoad> loads;
  for (size_t i = 0; i < engines_.size(); ++i) {
    const bool is_asleep = engines_[i]->is_asleep();
    if (is_asleep) router_.forget(i);
    loads.push_back({engines_[i]->is_up() && !is_asleep, engines_[i]->num_requests()});
  }
  std::vector<size_t> order = router_.rank(routed.prompt, loads);
  if (routed.is_stop && routed.id_hash != 0) {
    std::vector<uint64_t> newest;
    for (const size_t i : order) newest.push_back(engines_[i]->newest_of(routed.id_hash));
    const auto owner = order.begin() + (std::max_element(newest.begin(), newest.end()) - newest.begin());
    std::rotate(order.begin(), owner, owner + 1);
  }
  return order;
}

// The writer has the request's frame, which may hold 64 MiB.  A replica that is down is left out: it comes back as
// config.pbtxt says, awake.
void Replicas::submit_to_all(FrameWriter& writer, OpenRequest& open, bool empties_caches) {
  std::vector<size_t> up;
  for (size_t i = 0; i < engines_.size(); ++i) {
    if (engines_[i]->is_up()) up.push_back(i);
  }
  if (up.empty()) throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, why_down());
  std::vector<uint64_t> handles;  // made before the first is sent: afterwards nothing may fail
  for (size_t i = 0; i < up.size(); ++i) handles.push_back(new_handle());
  for (size_t i = 0; i < engines_.size() && empties_caches; ++i) router_.forget(i);
  open.broadcast = std::make_shared<Broadcast>(up.size());
  for (size_t i = 0; i < up.size(); ++i) {
    const auto refused = [&](TRITONSERVER_Error_Code code, const std::string& reason) {
      if (!open.broadcast->settle(code, reason)) return;
      refuse(open, open.broadcast->error()->code, open.broadcast->error()->what());
    };
    try {
      if (const auto link = engines_[up[i]]->take(handles[i], open)) {
        engines_[up[i]]->pass_on(*link, handles[i], writer.with_handle(handles[i]));
      } else {
        refused(TRITONSERVER_ERROR_UNAVAILABLE, engines_[up[i]]->why_down());
      }
    } catch (const BackendError& error) {
      refused(error.code, error.what());
    } catch (const std::exception&) {  // others may have it: it is theirs to answer
      refused(TRITONSERVER_ERROR_INTERNAL, "the request could not be passed on to a replica");
    }
  }
}

// Without a report of the engine, as many as are ever kept.
size_t Replicas::capacity_of(size_t replica) const noexcept {
  const size_t num_tokens = engines_[replica]->num_cached_tokens();
  return num_tokens > 0 ? std::max<size_t>(1, num_tokens / kBlockTokens) : kMostKnownBlocks;
}

}  // namespace slipstream
