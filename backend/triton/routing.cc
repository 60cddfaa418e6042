#include "routing.h"

#include <functional>
#include <string>

#include "json_splice.h"
#include "status.h"

namespace slipstream {
namespace {

constexpr size_t kLengthBytes = 4;  // before each element of a BYTES tensor

// The first buffer of an input; empty when there is none.
std::string_view tensor(TRITONBACKEND_Request* request, const char* name) {
  TRITONBACKEND_Input* input = nullptr;
  const void* buffer = nullptr;
  uint64_t size = 0;
  TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  TRITONSERVER_Error* error = TRITONBACKEND_RequestInput(request, name, &input);
  if (error == nullptr) error = TRITONBACKEND_InputBuffer(input, 0, &buffer, &size, &memory_type, &memory_id);
  if (error != nullptr) {
    TRITONSERVER_ErrorDelete(error);
    return {};
  }
  if (memory_type == TRITONSERVER_MEMORY_GPU) return {};
  return {static_cast<const char*>(buffer), size};
}

std::string_view text_tensor(TRITONBACKEND_Request* request, const char* name) {
  const std::string_view element = tensor(request, name);
  return element.substr(std::min(kLengthBytes, element.size()));
}

// The request parameters of these names.
struct Parameters {
  std::string_view id, control, cache_salt, lora_name, sampling_parameters;
  bool is_stop = false;
};

void read_text(Parameters& found, std::string_view name, std::string_view value) {
  if (name == "id" || name == "request_id") found.id = value;
  if (name == "control") found.control = value;
  if (name == "cache_salt") found.cache_salt = value;
  if (name == "lora_name") found.lora_name = value;
  if (name == "sampling_parameters") found.sampling_parameters = value;
}

Parameters read_parameters(TRITONBACKEND_Request* request) {
  Parameters found;
  uint32_t count = 0;
  check(TRITONBACKEND_RequestParameterCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* name;
    TRITONSERVER_ParameterType type;
    const void* value;
    check(TRITONBACKEND_RequestParameter(request, i, &name, &type, &value));
    if (type == TRITONSERVER_PARAMETER_STRING) read_text(found, name, static_cast<const char*>(value));
    if (type == TRITONSERVER_PARAMETER_BOOL && std::string_view(name) == "stop") {
      found.is_stop = *static_cast<const bool*>(value);
    }
  }
  return found;
}

// A text that a client gives as tensor, request parameter or in the JSON, in this order.
std::string_view text_of(
    TRITONBACKEND_Request* request, const char* name, std::string_view parameter, std::string_view json) {
  const std::string_view given = text_tensor(request, name);
  if (!given.empty()) return given;
  if (!parameter.empty() || json.find(name) == std::string_view::npos) return parameter;
  try {
    return json_member(json, name).value_or("");
  } catch (const std::runtime_error&) {  // no JSON
    return "";
  }
}

// What cached prefixes depend on besides the prompt.
std::string seed_of(TRITONBACKEND_Request* request, const Parameters& parameters) {
  std::string_view json = text_tensor(request, "sampling_parameters");
  if (json.empty()) json = parameters.sampling_parameters;
  std::string seed(text_of(request, "cache_salt", parameters.cache_salt, json));
  seed += '\0';
  return seed.append(text_of(request, "lora_name", parameters.lora_name, json));
}

}  // namespace

Command read_command(TRITONBACKEND_Request* request) {
  Command command;
  const Parameters parameters = read_parameters(request);
  const std::string_view stop = tensor(request, "stop"), control = parameters.control;
  command.is_stop = stop.empty() ? parameters.is_stop : stop[0] != 0;
  command.is_control = !control.empty();
  command.is_question = control == "is_sleeping" || control == "list_lora_adapters";
  command.empties_caches = control == "sleep" || control == "reload_weights";
  return command;
}

uint64_t read_id_hash(TRITONBACKEND_Request* request) {
  const char* id;
  check(TRITONBACKEND_RequestId(request, &id));
  const std::string_view named = *id != '\0' ? std::string_view(id) : read_parameters(request).id;
  return named.empty() ? 0 : std::hash<std::string_view>()(named) | 1;
}

PromptBlocks read_prompt(TRITONBACKEND_Request* request) {
  std::string_view prompt = tensor(request, "input_ids");
  if (prompt.empty()) prompt = text_tensor(request, "text_input");
  return hash_blocks(prompt, seed_of(request, read_parameters(request)));
}

}  // namespace slipstream
