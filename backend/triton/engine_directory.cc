#include "engine_directory.h"

#include <algorithm>

#include "engine.h"

namespace slipstream {

void EngineDirectory::add(Engine* engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  engines_.push_back(engine);
}

void EngineDirectory::remove(Engine* engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  engines_.erase(std::remove(engines_.begin(), engines_.end(), engine), engines_.end());
}

void EngineDirectory::cancel(uint64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Engine* engine : engines_) {
    if (engine->cancel(handle)) return;
  }
}

bool EngineDirectory::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(engines_.begin(), engines_.end(), [](Engine* engine) { return engine->is_idle(); });
}

template <typename Question>
bool EngineDirectory::any_later(const Engine* engine, Question question) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto self = std::find(engines_.begin(), engines_.end(), engine);
  return self != engines_.end() && std::any_of(self + 1, engines_.end(), [&](Engine* later) {
           return later->is_of_model(*engine) && !later->is_replica_of(*engine) && question(*later);
         });
}

bool EngineDirectory::is_replaced(const Engine* engine) {
  return any_later(engine, [](Engine& later) { return later.was_asked(); });
}

bool EngineDirectory::has_successor(const Engine* engine) {
  return any_later(engine, [](Engine& later) { return later.is_up() || later.was_asked(); });
}

template <typename Question>
bool EngineDirectory::any_replica(const Engine* engine, Question question) {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(engines_.begin(), engines_.end(), [&](Engine* other) {
    return (other == engine || other->is_replica_of(*engine)) && question(*other);
  });
}

bool EngineDirectory::has_requests(const Engine* engine) {
  return any_replica(engine, [](Engine& replica) { return !replica.is_idle(); });
}

bool EngineDirectory::was_asked(const Engine* engine) {
  return any_replica(engine, [](Engine& replica) { return replica.was_asked(); });
}

bool EngineDirectory::serves_on(const Engine* engine) {
  if (any_replica(engine, [](Engine& replica) { return replica.is_up(); })) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(engines_.begin(), engines_.end(), [engine](Engine* other) {
    return other->is_of_other_version(*engine) && other->is_up();
  });
}

}  // namespace slipstream
