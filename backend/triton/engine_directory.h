// Every engine of the process.  Any thread; an engine that is asked here never asks back under its own locks.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace slipstream {

class Engine;

class EngineDirectory {
 public:
  void add(Engine* engine);
  void remove(Engine* engine);
  // Cancel this request, whichever engine has it; nothing happens when none does.  So a request of one model can cancel a
  // request of another by its handle.
  void cancel(uint64_t handle);
  // Whether no engine has a request.
  bool is_idle();
  // Whether requests for this engine's model go to an engine that was made later, after a reload.
  bool is_replaced(const Engine* engine);
  // Whether they do or are about to: a later engine serves.
  bool has_successor(const Engine* engine);

  // Whether any engine of this one's model, itself included, has a request, and whether any was ever handed one.
  bool has_requests(const Engine* engine);
  bool was_asked(const Engine* engine);
  // Whether one of these serves, or one of another version of the model: an unload, which is of all versions, would end
  // that one too.
  bool serves_on(const Engine* engine);

 private:
  template <typename Question>
  bool any_replica(const Engine* engine, Question question);
  template <typename Question>
  bool any_later(const Engine* engine, Question question);

  std::mutex mutex_;
  std::vector<Engine*> engines_;  // in the order in which they were made
};

}  // namespace slipstream
