#include "request.h"

#include <sys/random.h>
#include <time.h>

#include "status.h"
#include "trace.h"

namespace slipstream {
namespace {

uint64_t realtime_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

struct Input {
  const char* name;
  TRITONSERVER_DataType dtype;
  const int64_t* shape;
  uint32_t rank, num_buffers;
  uint64_t num_bytes;
};

Input input_at(TRITONBACKEND_Request* request, uint32_t index, TRITONBACKEND_Input*& handle) {
  Input input{};
  check(TRITONBACKEND_RequestInputByIndex(request, index, &handle));
  check(TRITONBACKEND_InputProperties(
      handle, &input.name, &input.dtype, &input.shape, &input.rank, &input.num_bytes, &input.num_buffers));
  return input;
}

struct Parameter {
  const char* name;
  TRITONSERVER_ParameterType type;
  const void* value;

  std::string_view text() const { return static_cast<const char*>(value); }
};

Parameter parameter_at(TRITONBACKEND_Request* request, uint32_t index) {
  Parameter parameter{};
  check(TRITONBACKEND_RequestParameter(request, index, &parameter.name, &parameter.type, &parameter.value));
  return parameter;
}

[[noreturn]] void refuse(const std::string& given, size_t most) {
  throw BackendError(
      TRITONSERVER_ERROR_INVALID_ARG, "the request has " + given + ", accepted: at most " + std::to_string(most));
}

void limit(const char* what, uint32_t count, uint32_t most) {
  if (count > most) refuse(std::to_string(count) + " " + what, most);
}

// Adds up the bytes of a request.
class Budget {
 public:
  void take(const char* what, size_t num_bytes) {
    if (num_bytes > kMaxRequestBytes - taken_) {
      refuse(
          std::to_string(num_bytes) + " bytes of a " + what + " after " + std::to_string(taken_) + " others",
          kMaxRequestBytes);
    }
    taken_ += num_bytes;
  }
  void take_name(const char* what, std::string_view name, size_t most = kMaxNameBytes) {
    if (name.size() > most) refuse("a " + std::string(what) + " of " + std::to_string(name.size()) + " bytes", most);
    take(what, name.size());
  }

 private:
  size_t taken_ = 0;
};

struct Contents {
  const char* id;
  uint64_t timeout_us;
  uint32_t num_outputs, num_inputs, num_parameters;
};

// Looks at everything without copying it.  Throws BackendError for what is above the limits.
Contents measure(TRITONBACKEND_Request* request) {
  Contents found{};
  Budget budget;
  check(TRITONBACKEND_RequestId(request, &found.id));
  check(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(request, &found.timeout_us));
  budget.take_name("request id", found.id, kMaxRequestIdBytes);
  check(TRITONBACKEND_RequestOutputCount(request, &found.num_outputs));
  check(TRITONBACKEND_RequestInputCount(request, &found.num_inputs));
  check(TRITONBACKEND_RequestParameterCount(request, &found.num_parameters));
  limit("requested outputs", found.num_outputs, kMaxRequestOutputs);
  limit("inputs", found.num_inputs, kMaxRequestInputs);
  limit("request parameters", found.num_parameters, kMaxRequestParameters);
  for (uint32_t i = 0; i < found.num_outputs; ++i) {
    const char* name;
    check(TRITONBACKEND_RequestOutputName(request, i, &name));
    budget.take_name("requested output's name", name);
  }
  for (uint32_t i = 0; i < found.num_inputs; ++i) {
    TRITONBACKEND_Input* handle;
    const Input input = input_at(request, i, handle);
    budget.take_name("input's name", input.name);
    limit("dimensions of an input", input.rank, kMaxRank);
    budget.take("tensor", input.num_bytes);
  }
  for (uint32_t i = 0; i < found.num_parameters; ++i) {
    const Parameter parameter = parameter_at(request, i);
    budget.take_name("request parameter's name", parameter.name);
    if (parameter.type == TRITONSERVER_PARAMETER_STRING) budget.take("request parameter", parameter.text().size());
  }
  return found;
}

void write_input(FrameWriter& writer, TRITONBACKEND_Request* request, uint32_t index) {
  TRITONBACKEND_Input* handle;
  const Input input = input_at(request, index, handle);
  writer.str(input.name);
  writer.u8(static_cast<uint8_t>(input.dtype));
  writer.count8(input.rank);
  writer.raw(input.shape, input.rank * sizeof(int64_t));
  writer.count32(input.num_bytes);
  uint64_t left = input.num_bytes;
  for (uint32_t i = 0; i < input.num_buffers; ++i) {
    const void* buffer;
    uint64_t size;
    TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(handle, i, &buffer, &size, &memory_type, &memory_id));
    if (memory_type == TRITONSERVER_MEMORY_GPU) {
      throw BackendError(TRITONSERVER_ERROR_UNSUPPORTED, std::string("input '") + input.name + "' lies in GPU memory");
    }
    if (size > left) break;
    writer.raw(buffer, size);
    left -= size;
  }
  if (left != 0) {  // the frame would be read with its fields shifted
    throw BackendError(
        TRITONSERVER_ERROR_INVALID_ARG,
        std::string("input '") + input.name + "' has buffers that do not add up to its " +
            std::to_string(input.num_bytes) + " bytes");
  }
}

void write_parameter(FrameWriter& writer, TRITONBACKEND_Request* request, uint32_t index) {
  const Parameter parameter = parameter_at(request, index);
  writer.str(parameter.name);
  switch (parameter.type) {
    case TRITONSERVER_PARAMETER_STRING:
      writer.u8(static_cast<uint8_t>(ParameterKind::kString));
      return writer.text(parameter.text());
    case TRITONSERVER_PARAMETER_INT:
      writer.u8(static_cast<uint8_t>(ParameterKind::kInt));
      return writer.i64(*static_cast<const int64_t*>(parameter.value));
    case TRITONSERVER_PARAMETER_BOOL:
      writer.u8(static_cast<uint8_t>(ParameterKind::kBool));
      return writer.u8(*static_cast<const bool*>(parameter.value) ? 1 : 0);
    case TRITONSERVER_PARAMETER_DOUBLE:
      writer.u8(static_cast<uint8_t>(ParameterKind::kDouble));
      return writer.f64(*static_cast<const double*>(parameter.value));
    default:
      throw BackendError(
          TRITONSERVER_ERROR_INVALID_ARG,
          std::string("request parameter '") + parameter.name + "' is of an unsupported type");
  }
}

}  // namespace

uint64_t new_handle() {
  uint64_t handle = 0;
  while (handle == 0) {
    if (getrandom(&handle, sizeof handle, 0) != static_cast<ssize_t>(sizeof handle)) {
      throw BackendError(TRITONSERVER_ERROR_INTERNAL, "the system gives no random bytes");
    }
  }
  return handle;
}

void limit_command(size_t num_bytes) {
  if (num_bytes > kMaxCommandBytes) refuse("a command of " + std::to_string(num_bytes) + " bytes", kMaxCommandBytes);
}

uint64_t upstream_handle(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_RequestInput(request, "REQUEST_HANDLE", &input)) {
    TRITONSERVER_ErrorDelete(error);  // most requests have none
    return 0;
  }
  const void* buffer = nullptr;
  uint64_t size = 0, handle = 0;
  TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  if (TRITONSERVER_Error* error = TRITONBACKEND_InputBuffer(input, 0, &buffer, &size, &memory_type, &memory_id)) {
    TRITONSERVER_ErrorDelete(error);  // an empty tensor
    return 0;
  }
  if (size == sizeof handle && memory_type != TRITONSERVER_MEMORY_GPU) std::memcpy(&handle, buffer, sizeof handle);
  return handle;
}

bool feeds_step(TRITONBACKEND_Request* request) {
  uint32_t num_outputs = 0;
  check(TRITONBACKEND_RequestOutputCount(request, &num_outputs));
  bool has_handle = false;
  for (uint32_t i = 0; i < num_outputs; ++i) {
    const char* name;
    check(TRITONBACKEND_RequestOutputName(request, i, &name));
    if (std::string_view(name) == "text_output") return false;
    has_handle = has_handle || std::string_view(name) == "request_handle";
  }
  return has_handle;
}

std::string_view encode_request(FrameWriter& writer, uint64_t handle, TRITONBACKEND_Request* request) {
  const Contents contents = measure(request);
  const std::string traceparent = traceparent_of(request);
  try {
    writer.begin(FrameType::kRequest);
    writer.u64(handle);
    writer.u64(realtime_ns());
    writer.u64(contents.timeout_us);
    writer.str(contents.id);
    writer.count16(contents.num_outputs);
    for (uint32_t i = 0; i < contents.num_outputs; ++i) {
      const char* name;
      check(TRITONBACKEND_RequestOutputName(request, i, &name));
      writer.str(name);
    }
    writer.count16(contents.num_inputs);
    for (uint32_t i = 0; i < contents.num_inputs; ++i) write_input(writer, request, i);
    writer.count16(contents.num_parameters + (traceparent.empty() ? 0 : 1));
    for (uint32_t i = 0; i < contents.num_parameters; ++i) write_parameter(writer, request, i);
    if (!traceparent.empty()) {  // behind the client's: of two with this name the last one counts
      writer.str(kTritonTraceparent);
      writer.u8(static_cast<uint8_t>(ParameterKind::kString));
      writer.text(traceparent);
    }
    return writer.finish();
  } catch (const std::length_error& error) {
    throw BackendError(TRITONSERVER_ERROR_INVALID_ARG, error.what());
  }
}

}  // namespace slipstream
