// A loaded model: its config completed from the contract, and its engines.
#pragma once

#include <memory>
#include <string>

#include "api.h"
#include "engine.h"
#include "replicas.h"

namespace slipstream {

constexpr int kMostReplicas = 64;
constexpr size_t kMostSpareRequests = 1024;  // beyond those that an engine runs and keeps waiting

// The backend's state in Triton: created by TRITONBACKEND_Initialize, lives until TRITONBACKEND_Finalize.
struct Backend {
  std::string directory;  // where the shared library, slipstream-engine and contract.json are
  Services services;
};

class Model {
 public:
  // Completes the config, starts the engines and waits until they serve.  Throws BackendError: the load error.
  Model(TRITONBACKEND_Model* model, Backend& backend);

  Replicas& replicas() { return *replicas_; }

  // Takes requests from Triton and always releases them.  Any thread.
  void execute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count);

 private:
  void execute_one(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request);

  void cancel_upstream(TRITONBACKEND_Request* request);

  EngineDirectory& engines_;
  std::unique_ptr<Replicas> replicas_;
};

// Splice the contract's inputs, outputs and policy into a model config (both JSON), where the user gave none.
// Throws std::runtime_error for a task that the contract does not know.
std::string complete_config(const std::string& config, const std::string& contract);

// How many engines this config asks for.  Throws BackendError for more than kMostReplicas.
int count_replicas(const std::string& config);

}  // namespace slipstream
