#include "fake_api.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using Error = TRITONSERVER_Error*;

std::atomic<bool> server_logs{false};

static void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "misuse of the API: %s\n", what);
  std::abort();
}

bool Client::wait_end(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex);
  return changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return has_ended; });
}

uint64_t Client::wait_handle(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return handle != 0 || has_ended; });
  return handle;
}

void Client::take(uint32_t flags, TRITONSERVER_Error* failure, size_t bytes, uint64_t sent_handle) {
  std::lock_guard<std::mutex> lock(mutex);
  require(!has_ended, "a response after the final one");
  ++num_responses;
  num_bytes += bytes;
  if (sent_handle != 0) handle = sent_handle;
  if (failure != nullptr) error = failure->message;
  has_ended = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  changed.notify_all();
}

struct TRITONSERVER_Parameter {
  std::string name;
};
struct TRITONSERVER_MetricFamily {
  std::string name;
};
struct TRITONSERVER_Metric {
  std::atomic<double> value{0};
};
struct TRITONBACKEND_Output {
  std::vector<char> data;
};
struct TRITONBACKEND_Response {
  std::shared_ptr<Client> client;
  std::vector<std::unique_ptr<TRITONBACKEND_Output>> outputs;
};

static Error refused(const char* message) {
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_NOT_FOUND, message);
}

extern "C" {

// ---------------------------------------------------------------- errors, log, messages

Error TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* message) {
  return new TRITONSERVER_Error{code, message};
}
void TRITONSERVER_ErrorDelete(Error error) {
  delete error;
}
TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(Error error) {
  return error->code;
}
const char* TRITONSERVER_ErrorMessage(Error error) {
  return error->message.c_str();
}
bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel) {
  return server_logs;
}
Error TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char*, const int, const char* message) {
  if (server_logs) std::fprintf(stderr, "log: %s\n", message);
  return nullptr;
}
Error TRITONSERVER_MessageNewFromSerializedJson(TRITONSERVER_Message** message, const char* base, size_t size) {
  *message = new TRITONSERVER_Message{std::string(base, size)};
  return nullptr;
}
Error TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message* message, const char** base, size_t* size) {
  *base = message->json.data();
  *size = message->json.size();
  return nullptr;
}
Error TRITONSERVER_MessageDelete(TRITONSERVER_Message* message) {
  delete message;
  return nullptr;
}

// ---------------------------------------------------------------- the server and its metrics

TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(const char* name, const TRITONSERVER_ParameterType, const void*) {
  return new TRITONSERVER_Parameter{name};
}
void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter) {
  delete parameter;
}
Error TRITONSERVER_ServerIsLive(TRITONSERVER_Server*, bool* is_live) {
  *is_live = true;
  return nullptr;
}
Error TRITONSERVER_ServerMetadata(TRITONSERVER_Server*, TRITONSERVER_Message** metadata) {
  *metadata = new TRITONSERVER_Message{"{\"name\":\"fake\",\"version\":\"2.51.0\"}"};
  return nullptr;
}
Error TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server*, const char*, const int64_t, bool* is_ready) {
  *is_ready = true;
  return nullptr;
}

Error TRITONSERVER_ServerModelIndex(TRITONSERVER_Server*, uint32_t, TRITONSERVER_Message** index) {
  *index = new TRITONSERVER_Message{"[]"};
  return nullptr;
}
Error TRITONSERVER_ServerLoadModel(TRITONSERVER_Server*, const char*) {
  return refused("no explicit control");
}
Error TRITONSERVER_ServerLoadModelWithParameters(
    TRITONSERVER_Server*, const char*, const TRITONSERVER_Parameter**, const uint64_t) {
  return refused("no explicit control");
}
Error TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server*, const char*) {
  return refused("no explicit control");
}
Error TRITONSERVER_MetricFamilyNew(
    TRITONSERVER_MetricFamily** family, const TRITONSERVER_MetricKind, const char* name, const char*) {
  *family = new TRITONSERVER_MetricFamily{name};
  return nullptr;
}
Error TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily* family) {
  delete family;
  return nullptr;
}
Error TRITONSERVER_MetricNew(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily*, const TRITONSERVER_Parameter** labels, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) require(labels[i] != nullptr, "a null label");
  *metric = new TRITONSERVER_Metric();
  return nullptr;
}
Error TRITONSERVER_MetricDelete(TRITONSERVER_Metric* metric) {
  delete metric;
  return nullptr;
}
Error TRITONSERVER_MetricIncrement(TRITONSERVER_Metric* metric, double value) {
  if (!(value >= 0)) return refused("a counter cannot fall");
  metric->value = metric->value + value;
  return nullptr;
}
Error TRITONSERVER_MetricSet(TRITONSERVER_Metric* metric, double value) {
  metric->value = value;
  return nullptr;
}

// ---------------------------------------------------------------- backend, model, instance

Error TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = 1;
  *minor = 19;
  return nullptr;
}
Error TRITONBACKEND_BackendArtifacts(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_ArtifactType* type, const char** location) {
  *type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
  *location = backend->directory.c_str();
  return nullptr;
}
Error TRITONBACKEND_BackendState(TRITONBACKEND_Backend* backend, void** state) {
  *state = backend->state;
  return nullptr;
}
Error TRITONBACKEND_BackendSetState(TRITONBACKEND_Backend* backend, void* state) {
  backend->state = state;
  return nullptr;
}
Error TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
    TRITONBACKEND_BackendAttribute*, const TRITONSERVER_InstanceGroupKind, const uint64_t, const uint64_t*,
    const uint64_t) {
  return nullptr;
}
Error TRITONBACKEND_ModelName(TRITONBACKEND_Model* model, const char** name) {
  *name = model->name.c_str();
  return nullptr;
}
Error TRITONBACKEND_ModelVersion(TRITONBACKEND_Model*, uint64_t* version) {
  *version = 1;
  return nullptr;
}
Error TRITONBACKEND_ModelRepository(
    TRITONBACKEND_Model* model, TRITONBACKEND_ArtifactType* type, const char** location) {
  return TRITONBACKEND_BackendArtifacts(model->backend, type, location);
}
Error TRITONBACKEND_ModelConfig(TRITONBACKEND_Model* model, const uint32_t, TRITONSERVER_Message** config) {
  *config = new TRITONSERVER_Message{model->config};
  return nullptr;
}
Error TRITONBACKEND_ModelAutoCompleteConfig(TRITONBACKEND_Model*, bool* auto_complete) {
  *auto_complete = true;
  return nullptr;
}
Error TRITONBACKEND_ModelSetConfig(TRITONBACKEND_Model* model, const uint32_t, TRITONSERVER_Message* config) {
  model->config = config->json;
  return nullptr;
}
Error TRITONBACKEND_ModelServer(TRITONBACKEND_Model*, TRITONSERVER_Server** server) {
  static char one;
  *server = reinterpret_cast<TRITONSERVER_Server*>(&one);
  return nullptr;
}
Error TRITONBACKEND_ModelBackend(TRITONBACKEND_Model* model, TRITONBACKEND_Backend** backend) {
  *backend = model->backend;
  return nullptr;
}
Error TRITONBACKEND_ModelState(TRITONBACKEND_Model* model, void** state) {
  *state = model->state;
  return nullptr;
}
Error TRITONBACKEND_ModelSetState(TRITONBACKEND_Model* model, void* state) {
  model->state = state;
  return nullptr;
}
Error TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Model** model) {
  *model = instance->model;
  return nullptr;
}
Error TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request* request, const bool, uint64_t, uint64_t, uint64_t, uint64_t) {
  require(request->num_releases == 0, "statistics of a released request");
  std::lock_guard<std::mutex> lock(request->client->mutex);
  require(request->client->has_ended, "statistics before the last response");
  return nullptr;
}
Error TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
  return nullptr;
}

// ---------------------------------------------------------------- requests

Error TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id) {
  require(request->num_releases == 0, "a released request is read");
  *id = request->id.c_str();
  return nullptr;
}
Error TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request* request, uint64_t* timeout) {
  *timeout = request->timeout_us;
  return nullptr;
}
Error TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = static_cast<uint32_t>(request->outputs.size());
  return nullptr;
}
Error TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request* request, const uint32_t index, const char** name) {
  if (index >= request->outputs.size()) return refused("no such output");
  *name = request->outputs[index].c_str();
  return nullptr;
}
Error TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = static_cast<uint32_t>(request->inputs.size());
  return nullptr;
}
Error TRITONBACKEND_RequestInput(TRITONBACKEND_Request* request, const char* name, TRITONBACKEND_Input** found) {
  for (TRITONBACKEND_Input& input : request->inputs) {
    if (input.name != name) continue;
    *found = &input;
    return nullptr;
  }
  return refused("no such input");
}
Error TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request* request, uint32_t index, TRITONBACKEND_Input** input) {
  if (index >= request->inputs.size()) return refused("no such input");
  *input = &request->inputs[index];
  return nullptr;
}
Error TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* input, const char** name, TRITONSERVER_DataType* dtype, const int64_t** shape,
    uint32_t* dims_count, uint64_t* byte_size, uint32_t* buffer_count) {
  *name = input->name.c_str();
  *dtype = input->dtype;
  *shape = input->shape.data();
  *dims_count = static_cast<uint32_t>(input->shape.size());
  *byte_size = input->num_bytes;
  *buffer_count = static_cast<uint32_t>(input->buffers.size());
  return nullptr;
}
Error TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input* input, const uint32_t index, const void** buffer, uint64_t* byte_size,
    TRITONSERVER_MemoryType* memory_type, int64_t*) {
  if (index >= input->buffers.size()) return refused("no such buffer");
  *buffer = input->buffers[index].data();
  *byte_size = input->buffers[index].size();
  *memory_type = input->memory_type;
  return nullptr;
}
Error TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = static_cast<uint32_t>(request->parameters.size());
  return nullptr;
}
Error TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request* request, const uint32_t index, const char** key, TRITONSERVER_ParameterType* type,
    const void** value) {
  if (index >= request->parameters.size()) return refused("no such parameter");
  const RequestParameter& one = request->parameters[index];
  *key = one.name.c_str();
  *type = one.type;
  *value = one.text.c_str();
  if (one.type == TRITONSERVER_PARAMETER_INT) *value = &one.integer;
  if (one.type == TRITONSERVER_PARAMETER_BOOL) *value = &one.truth;
  if (one.type == TRITONSERVER_PARAMETER_DOUBLE) *value = &one.real;
  return nullptr;
}
Error TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* request, bool* is_cancelled) {
  *is_cancelled = request->client->is_cancelled;
  return nullptr;
}
Error TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t) {
  require(++request->num_releases == 1, "a request is released twice");
  if (request->on_release != nullptr) request->on_release(request);
  return nullptr;
}

// ---------------------------------------------------------------- responses

Error TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory** factory, TRITONBACKEND_Request* request) {
  *factory = new TRITONBACKEND_ResponseFactory{request->client};
  return nullptr;
}
Error TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory* factory) {
  delete factory;
  return nullptr;
}
Error TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory* factory, const uint32_t flags) {
  factory->client->take(flags, nullptr, 0);
  return nullptr;
}
Error TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory* factory, bool* is_cancelled) {
  *is_cancelled = factory->client->is_cancelled;
  return nullptr;
}
Error TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response** response, TRITONBACKEND_ResponseFactory* factory) {
  *response = new TRITONBACKEND_Response{factory->client, {}};
  return nullptr;
}
Error TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response) {
  delete response;
  return nullptr;
}
Error TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char*, const TRITONSERVER_DataType dtype,
    const int64_t* shape, const uint32_t dims_count) {
  require(static_cast<int>(dtype) >= 1 && static_cast<int>(dtype) <= 14, "an output of no known type");
  volatile int64_t seen = 0;
  for (uint32_t i = 0; i < dims_count; ++i) seen = shape[i];
  (void)seen;
  response->outputs.push_back(std::make_unique<TRITONBACKEND_Output>());
  *output = response->outputs.back().get();
  return nullptr;
}
Error TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output* output, void** buffer, const uint64_t byte_size, TRITONSERVER_MemoryType* memory_type,
    int64_t*) {
  output->data.resize(byte_size);
  *buffer = output->data.data();
  *memory_type = TRITONSERVER_MEMORY_CPU;
  return nullptr;
}
Error TRITONBACKEND_ResponseSend(TRITONBACKEND_Response* response, const uint32_t flags, Error error) {
  size_t num_bytes = 0;
  uint64_t handle = 0;
  for (const auto& output : response->outputs) {
    num_bytes += output->data.size();
    if (output->data.size() == sizeof handle) std::memcpy(&handle, output->data.data(), sizeof handle);
  }
  response->client->take(flags, error, num_bytes, handle);
  delete response;
  return nullptr;
}

}  // extern "C"
