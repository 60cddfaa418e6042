// The functions that Triton looks up in this library: each finds its object and hands over.
#include <cstdio>

#include "json_splice.h"
#include "model.h"
#include "status.h"

using namespace slipstream;

namespace {

constexpr uint32_t kApiMajor = 1;
constexpr uint32_t kApiMinor = 17;              // newest function used: request parameters and cancellation, r23.11
constexpr int kHookMajor = 2, kHookMinor = 67;  // server of 26.03, the first to ask TRITONBACKEND_ModelInstanceReady

Backend& backend_of(TRITONBACKEND_Model* model) {
  TRITONBACKEND_Backend* backend;
  void* state;
  check(TRITONBACKEND_ModelBackend(model, &backend));
  check(TRITONBACKEND_BackendState(backend, &state));
  return *static_cast<Backend*>(state);
}

Model& model_of(TRITONBACKEND_ModelInstance* instance) {
  TRITONBACKEND_Model* model;
  void* state;
  check(TRITONBACKEND_ModelInstanceModel(instance, &model));
  check(TRITONBACKEND_ModelState(model, &state));
  return *static_cast<Model*>(state);
}

// Whether this server asks instances if they are ready.
bool has_readiness_hook(TRITONBACKEND_Model* model) {
  TRITONSERVER_Server* server;
  TRITONSERVER_Message* message;
  const char* base;
  size_t size;
  check(TRITONBACKEND_ModelServer(model, &server));
  check(TRITONSERVER_ServerMetadata(server, &message));
  check(TRITONSERVER_MessageSerializeToJson(message, &base, &size));
  const std::string metadata(base, size);
  check(TRITONSERVER_MessageDelete(message));
  int major = 0, minor = 0;
  const auto version = json_member(metadata, "version");
  if (!version || sscanf(json_string(*version).c_str(), "%d.%d", &major, &minor) != 2) return false;
  return major > kHookMajor || (major == kHookMajor && minor >= kHookMinor);
}

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  return at_c_border([&] {
    uint32_t major, minor;
    check(TRITONBACKEND_ApiVersion(&major, &minor));
    const std::string found = std::to_string(major) + "." + std::to_string(minor);
    if (major != kApiMajor || minor < kApiMinor) {
      throw BackendError(
          TRITONSERVER_ERROR_UNSUPPORTED,
          "slipstream needs backend API 1." + std::to_string(kApiMinor) + " or a later 1.x; this server has " + found);
    }
    const char* directory;
    TRITONBACKEND_ArtifactType artifact;
    check(TRITONBACKEND_BackendArtifacts(backend, &artifact, &directory));
    auto* state = new Backend();
    state->directory = directory;
    check(TRITONBACKEND_BackendSetState(backend, state));
    log_info("slipstream backend in " + state->directory + ", backend API " + found);
  });
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  return at_c_border([&] {
    void* state;
    check(TRITONBACKEND_BackendState(backend, &state));
    delete static_cast<Backend*>(state);
  });
}

TRITONSERVER_Error* TRITONBACKEND_GetBackendAttribute(
    TRITONBACKEND_Backend*, TRITONBACKEND_BackendAttribute* attributes) {
  // The engine owns the devices: without this a server with GPUs would make one instance per GPU.
  return TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
      attributes, TRITONSERVER_INSTANCEGROUPKIND_CPU, 1, nullptr, 0);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return at_c_border([&] {
    Backend& backend = backend_of(model);
    if (has_readiness_hook(model)) backend.services.reloader.use_readiness_hook();
    check(TRITONBACKEND_ModelSetState(model, new Model(model, backend)));
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return at_c_border([&] {
    void* state;
    check(TRITONBACKEND_ModelState(model, &state));
    delete static_cast<Model*>(state);
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance) {
  return at_c_border([&] {
    Replicas& replicas = model_of(instance).replicas();
    if (!replicas.is_up()) throw BackendError(TRITONSERVER_ERROR_UNAVAILABLE, replicas.why_down());
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t request_count) {
  return at_c_border([&] { model_of(instance).execute(instance, requests, request_count); });
}

}  // extern "C"
