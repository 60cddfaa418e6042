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
  const Command command = read_command(open.request);
  if (command.is_control) limit_command(frame.size());
  open.is_command = command && frame.size() <= kMaxCommandBytes;
  open.feeds_step = feeds_step(open.request);
  open.passed_ns = monotonic_ns();
  if (engines_.size() == 1) return submit_to_one({0}, frame, handle, open, {});
  if (command.is_control) return submit_to_all(writer, open, command);
  const uint64_t id_hash = read_id_hash(open.request);
  if (command.is_stop) return submit_to_one({owner_of(id_hash)}, frame, handle, open, {});
  open.id_hash = id_hash;
  const PromptBlocks prompt = read_prompt(open.request);
  submit_to_one(rank(prompt), frame, handle, open, prompt);
}

void Replicas::submit_to_one(
    const std::vector<size_t>& replicas, std::string_view frame, uint64_t handle, const OpenRequest& open,
    const PromptBlocks& prompt) {
  std::optional<BackendError> refusal;
  for (const size_t i : replicas) {
    std::shared_ptr<EngineLink> link;
    try {
      link = engines_[i]->take(handle, open);
    } catch (const BackendError& error) {  // it does not keep up: another one may
      if (!refusal) refusal.emplace(error);
    }
    if (link == nullptr) continue;
    router_.was_sent(i, prompt, capacity_of(i));
    return engines_[i]->pass_on(*link, handle, frame);
  }
  if (refusal) throw BackendError(*refusal);
  throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, why_down());
}

// The best first.
std::vector<size_t> Replicas::rank(const PromptBlocks& prompt) {
  std::vector<ReplicaLoad> loads;
  for (size_t i = 0; i < engines_.size(); ++i) {
    const bool is_asleep = engines_[i]->is_asleep();
    if (is_asleep) router_.forget(i);
    loads.push_back({engines_[i]->is_up() && !is_asleep, engines_[i]->num_requests()});
  }
  return router_.rank(prompt, loads);
}

// The one that gets a stop, as no other has what it ends: that with the newest request of this id, else the best.
size_t Replicas::owner_of(uint64_t id_hash) {
  const std::vector<size_t> order = rank({});
  std::vector<uint64_t> newest;
  for (const size_t i : order) newest.push_back(id_hash == 0 ? 0 : engines_[i]->newest_of(id_hash));
  return order[static_cast<size_t>(std::max_element(newest.begin(), newest.end()) - newest.begin())];
}

// The writer has the command's frame.  A command that changes the replicas waits for none, but is refused while another
// one is under way: those that had ended it would carry this one out, and the others refuse it.
void Replicas::submit_to_all(FrameWriter& writer, OpenRequest& open, const Command& command) {
  std::lock_guard<std::mutex> lock(command_mutex_);
  const auto change = change_.lock();
  if (!command.is_question && change != nullptr && !change->is_over()) {
    throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, "another command to the model is under way; try again later");
  }
  open.broadcast = std::make_shared<Broadcast>(engines_.size());
  const std::vector<Taken> taken = take_by_all(open);
  if (!command.is_question) change_ = open.broadcast;
  for (size_t i = 0; i < engines_.size() && command.empties_caches; ++i) router_.forget(i);
  const auto settled = [&](bool is_last) {
    if (is_last) refuse(open, open.broadcast->error()->code, open.broadcast->error()->what());
  };
  for (size_t i = taken.size(); i < engines_.size(); ++i) settled(open.broadcast->settle());  // before any can answer
  for (const Taken& one : taken) {
    try {
      one.engine->pass_on(*one.link, one.handle, writer.with_handle(one.handle));
    } catch (const std::exception&) {  // others may have it: it is theirs to answer
      settled(open.broadcast->settle(TRITONSERVER_ERROR_INTERNAL, "a command could not be passed on to a replica"));
    }
  }
}

// All that are up have it, or none.  A replica that is down is left out: it comes back as config.pbtxt says, awake.
std::vector<Replicas::Taken> Replicas::take_by_all(const OpenRequest& open) {
  std::vector<Taken> taken;
  taken.reserve(engines_.size());
  try {
    for (const auto& engine : engines_) {
      const uint64_t handle = new_handle();
      if (auto link = engine->take(handle, open)) taken.push_back({engine.get(), handle, std::move(link)});
    }
  } catch (const std::exception&) {
    for (const Taken& one : taken) one.engine->give_back(one.handle);
    throw;
  }
  if (taken.empty()) throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, why_down());
  return taken;
}

// Without a report of the engine, as many as are ever kept.
size_t Replicas::capacity_of(size_t replica) const noexcept {
  const size_t num_tokens = engines_[replica]->num_cached_tokens();
  return num_tokens > 0 ? std::max<size_t>(1, num_tokens / kBlockTokens) : kMostKnownBlocks;
}

}  // namespace slipstream
