#include "model.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "command_line.h"
#include "json_splice.h"
#include "numerals.h"
#include "request.h"
#include "status.h"

namespace slipstream {
namespace {

std::string read_config(TRITONBACKEND_Model* model) {
  TRITONSERVER_Message* message;
  const char* base;
  size_t size;
  check(TRITONBACKEND_ModelConfig(model, 1, &message));
  TRITONSERVER_Error* error = TRITONSERVER_MessageSerializeToJson(message, &base, &size);
  std::string config = error == nullptr ? std::string(base, size) : "";
  log_if_failed(TRITONSERVER_MessageDelete(message), "model config");
  check(error);
  return config;
}

void write_config(TRITONBACKEND_Model* model, const std::string& config) {
  TRITONSERVER_Message* message;
  check(TRITONSERVER_MessageNewFromSerializedJson(&message, config.data(), config.size()));
  TRITONSERVER_Error* error = TRITONBACKEND_ModelSetConfig(model, 1, message);
  log_if_failed(TRITONSERVER_MessageDelete(message), "model config");
  check(error);
}

// "" when there is none.
std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return file ? std::string(std::istreambuf_iterator<char>(file), {}) : "";
}

std::string read_contract(const std::string& directory) {
  const std::string path = directory + "/contract.json";
  const std::string contract = read_file(path);
  if (!contract.empty()) return contract;
  throw BackendError(TRITONSERVER_ERROR_INTERNAL, path + " cannot be read: the install is incomplete");
}

// Whether the model's files came with its load request.  The server has such files in a temporary folder; so it has those
// of a repository in a cloud, which are there to be loaded again.
bool has_sent_files(const std::string& model_dir, const std::string& model_name) {
  if (model_dir.substr(model_dir.rfind('/') + 1) == model_name) return false;
  const std::string command_line = read_command_line();
  for (const char* cloud : {"s3://", "gs://", "as://"}) {
    if (command_line.find(cloud) != std::string::npos) return false;
  }
  return true;
}

// A parameter of config.pbtxt; an empty one counts as absent, as in core/config_parse.py.
std::optional<std::string> parameter(const std::string& config, std::string_view name) {
  const auto given = json_path(config, {"parameters", name, "string_value"});
  if (!given || json_string(*given).empty()) return std::nullopt;
  return json_string(*given);
}

// A number among them, refused in the words of the engine.
template <typename Number>
Number number_parameter(const std::string& config, const char* name, Number by_default, const char* accepted) {
  const auto given = parameter(config, name);
  if (!given) return by_default;
  if (const auto number = read_number<Number>(*given)) return *number;
  throw BackendError(
      TRITONSERVER_ERROR_INVALID_ARG, std::string(name) + "='" + *given + "': accepted: " + accepted);
}

// Another that the engine refuses by itself if it is none: it knows what an unfilled placeholder is.
long count_parameter(const std::string& config, const char* name, long by_default) {
  return read_number<long>(parameter(config, name).value_or("")).value_or(by_default);
}

// The parameters that this side acts upon; the engine has the defaults in core/config.py and their bounds.
std::chrono::milliseconds drain_timeout(const std::string& config) {
  constexpr double kDefaultSeconds = 60.0, kMostSeconds = 1e6;
  const double seconds = number_parameter(config, "drain_timeout_s", kDefaultSeconds, "a number >= 0");
  return std::chrono::milliseconds(seconds > 0 ? static_cast<int64_t>(std::min(seconds, kMostSeconds) * 1e3) : 0);
}

// How many requests an engine may have not answered yet: it runs and keeps no more, and takes time to read and refuse
// each, in which all that come behind wait.  The steps of an ensemble are as many as there are tokens.
size_t most_requests(const std::string& config) {
  constexpr long kDefaultRunning = 256, kDefaultWaiting = 1024, kCeiling = 1 << 30;
  if (parameter(config, "task").value_or("generate") != "generate") return SIZE_MAX;
  const char* waiting_name = parameter(config, "max_queue_size") ? "max_queue_size" : "max_waiting_requests";
  const long running = count_parameter(config, "max_num_seqs", kDefaultRunning);
  const long waiting = count_parameter(config, waiting_name, kDefaultWaiting);
  const long num_tokenised = std::clamp(waiting, 0L, kCeiling), num_running = std::clamp(running, 0L, kCeiling);
  return static_cast<size_t>(num_running + 2 * num_tokenised) + kMostSpareRequests;  // as many wait to be tokenised
}

size_t load_slack(const std::string& config) {
  constexpr long kDefaultSlack = 4;
  const long slack = number_parameter(config, "replica_load_slack", kDefaultSlack, "an integer from 0 to 1000000");
  return static_cast<size_t>(std::max(slack, 0L));
}

}  // namespace

std::string complete_config(const std::string& config, const std::string& contract) {
  const std::string task = parameter(config, "task").value_or("generate");
  const auto entry = json_member(contract, task);
  if (!entry)
    throw std::runtime_error("parameter 'task': unknown task '" + task + "'; see contract.json for the known");
  std::string completed = config;
  for (const char* key : {"input", "output"}) {
    const auto given = json_member(completed, key);
    const auto wanted = json_member(*entry, key);
    if (wanted && (!given || json_is_empty(*given))) completed = json_with_member(completed, key, *wanted);
  }
  const auto batch = json_member(*entry, "max_batch_size");
  const auto given_batch = json_member(completed, "max_batch_size");
  if (batch && (!given_batch || *given_batch == "0")) completed = json_with_member(completed, "max_batch_size", *batch);
  // What config.pbtxt says stands where it asks for less: one response a request, which plain infer calls want.
  const auto given_policy = json_path(completed, {"model_transaction_policy", "decoupled"});
  const bool wants_one = given_policy && *given_policy == "false";
  const auto decoupled = wants_one ? given_policy : json_member(*entry, "decoupled");
  const std::string policy = "{\"decoupled\":" + std::string(decoupled.value_or("true")) + "}";
  return json_with_member(completed, "model_transaction_policy", policy);
}

int count_replicas(const std::string& config) {
  const auto groups = json_member(config, "instance_group");
  if (!groups) return 1;
  long num_replicas = 0;
  for (const std::string_view group : json_elements(*groups)) {
    const auto count = json_member(group, "count");
    const long given = count ? std::strtol(std::string(*count).c_str(), nullptr, 10) : 1;
    num_replicas += std::clamp(given, 1L, long(kMostReplicas) + 1);
    if (num_replicas <= kMostReplicas) continue;
    throw BackendError(
        TRITONSERVER_ERROR_INVALID_ARG,
        "instance_group: got a count of " + std::to_string(given) + ", accepted: at most " +
            std::to_string(kMostReplicas) + " engines in all");
  }
  return static_cast<int>(std::max(1L, num_replicas));
}

Model::Model(TRITONBACKEND_Model* model, Backend& backend) : engines_(backend.services.engines) {
  EngineSetup setup;
  const char* text;
  TRITONBACKEND_ArtifactType artifact;
  setup.launcher = backend.directory + "/slipstream-engine";
  check(TRITONBACKEND_ModelName(model, &text));
  setup.model_name = text;
  check(TRITONBACKEND_ModelVersion(model, &setup.model_version));
  check(TRITONBACKEND_ModelRepository(model, &artifact, &text));
  setup.model_dir = text;
  check(TRITONBACKEND_ModelServer(model, &setup.server));

  const std::string given = read_config(model);
  const std::string config_name = option_of(read_command_line(), "model-config-name").value_or("");
  setup.given = {json_sorted(given), read_file(config_path(setup.model_dir, config_name))};
  setup.has_sent_files = has_sent_files(setup.model_dir, setup.model_name);
  backend.services.reloader.check_load(setup.model_name, setup.given);
  bool auto_complete = false;
  check(TRITONBACKEND_ModelAutoCompleteConfig(model, &auto_complete));
  if (auto_complete) write_config(model, complete_config(given, read_contract(backend.directory)));
  setup.config_json = read_config(model);
  if (!config_name.empty()) {
    setup.config_json = json_with_member(setup.config_json, "model_config_name", json_quoted(config_name));
  }
  const int num_replicas = count_replicas(setup.config_json);
  setup.drain_timeout = drain_timeout(setup.config_json);
  setup.most_requests = most_requests(setup.config_json);
  const size_t slack = load_slack(setup.config_json);
  replicas_ = std::make_unique<Replicas>(setup, num_replicas, slack, backend.services);
  replicas_->wait_until_ready();
}

void Model::execute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) execute_one(instance, requests[i]);
}

// An ensemble does not pass a cancellation on to a step that runs, but the steps it schedules afterwards are marked: so
// a token on its way to be detokenised carries the news to the model that generates.
void Model::cancel_upstream(TRITONBACKEND_Request* request) {
  bool is_cancelled = false;
  check(TRITONBACKEND_RequestIsCancelled(request, &is_cancelled));
  if (!is_cancelled) return;
  if (const uint64_t handle = upstream_handle(request)) engines_.cancel(handle);
}

void Model::execute_one(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
  static thread_local FrameWriter writer;
  OpenRequest open{instance, request, nullptr, monotonic_ns()};
  if (!log_if_failed(TRITONBACKEND_ResponseFactoryNew(&open.factory, request), "response factory")) {
    open.passed_ns = monotonic_ns();
    return open.close(false, open.passed_ns);
  }
  TRITONSERVER_Error_Code code = TRITONSERVER_ERROR_UNAVAILABLE;
  std::string reason;
  try {
    cancel_upstream(request);
    return replicas_->submit(writer, open);
  } catch (const BackendError& error) {
    code = error.code;
    reason = error.what();
  } catch (const std::exception& error) {  // out of memory, say: this request alone fails, and is told no details
    log_error(std::string("a request could not be passed on: ") + error.what());
    code = TRITONSERVER_ERROR_INTERNAL;
    reason = "the request could not be passed on to the engine; the server's log says why";
  }
  open.passed_ns = monotonic_ns();
  replicas_->refuse(open, code, reason);
}

}  // namespace slipstream
