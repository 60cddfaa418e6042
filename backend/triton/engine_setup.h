// What an engine of a model is started with, and its names.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "api.h"
#include "metrics.h"
#include "reloader.h"

namespace slipstream {

struct EngineSetup {
  std::string launcher;  // executable that takes --socket and --token
  std::string model_name;
  uint64_t model_version;
  std::string model_dir;
  std::string config_json;
  GivenConfig given;  // what config_json was completed from
  bool has_sent_files = false;  // they came with the load request: the server deletes them when it unloads the model
  size_t most_requests;  // that an engine may have not answered yet
  std::chrono::milliseconds drain_timeout;  // what running requests have when the model or the server ends
  TRITONSERVER_Server* server;
  int replica = 0, num_replicas = 1;    // this one's number, and how many engines the model has
  const void* siblings = nullptr;       // the same for the engines of one load of a model, and for no other
  std::function<void()> on_empty_cache;  // called whenever its prefix cache has been emptied

  // For messages: the engine of model 'llm', or replica 1 of model 'llm'.
  std::string name() const {
    return (num_replicas > 1 ? "replica " + std::to_string(replica) : "the engine") + " of model '" + model_name + "'";
  }
  std::string log_prefix() const {
    return model_name + (num_replicas > 1 ? "[" + std::to_string(replica) + "]: " : ": ");
  }
  Labels labels() const {
    Labels labels{{"model", model_name}, {"version", std::to_string(model_version)}};
    if (num_replicas > 1) labels.emplace_back("replica", std::to_string(replica));
    return labels;
  }
};

}  // namespace slipstream
