#include "request.h"

#include <time.h>

#include <atomic>

#include "status.h"

namespace slipstream {
namespace {

uint64_t realtime_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

void write_input(FrameWriter& writer, TRITONBACKEND_Input* input) {
  const char* name;
  TRITONSERVER_DataType dtype;
  const int64_t* shape;
  uint32_t rank, num_buffers;
  uint64_t num_bytes;
  check(TRITONBACKEND_InputProperties(input, &name, &dtype, &shape, &rank, &num_bytes, &num_buffers));
  if (num_bytes > kMaxPayloadBytes) {
    throw BackendError(TRITONSERVER_ERROR_INVALID_ARG, std::string("input '") + name + "' is longer than 256 MiB");
  }
  writer.str(name);
  writer.u8(static_cast<uint8_t>(dtype));
  writer.u8(static_cast<uint8_t>(rank));
  writer.raw(shape, rank * sizeof(int64_t));
  writer.u32(static_cast<uint32_t>(num_bytes));
  for (uint32_t i = 0; i < num_buffers; ++i) {
    const void* buffer;
    uint64_t size;
    TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(input, i, &buffer, &size, &memory_type, &memory_id));
    if (memory_type == TRITONSERVER_MEMORY_GPU) {
      throw BackendError(TRITONSERVER_ERROR_UNSUPPORTED, std::string("input '") + name + "' lies in GPU memory");
    }
    writer.raw(buffer, size);
  }
}

void write_parameter(FrameWriter& writer, TRITONBACKEND_Request* request, uint32_t index) {
  const char* name;
  TRITONSERVER_ParameterType type;
  const void* value;
  check(TRITONBACKEND_RequestParameter(request, index, &name, &type, &value));
  writer.str(name);
  switch (type) {
    case TRITONSERVER_PARAMETER_STRING:
      writer.u8(static_cast<uint8_t>(ParameterKind::kString));
      return writer.text(static_cast<const char*>(value));
    case TRITONSERVER_PARAMETER_INT:
      writer.u8(static_cast<uint8_t>(ParameterKind::kInt));
      return writer.i64(*static_cast<const int64_t*>(value));
    case TRITONSERVER_PARAMETER_BOOL:
      writer.u8(static_cast<uint8_t>(ParameterKind::kBool));
      return writer.u8(*static_cast<const bool*>(value) ? 1 : 0);
    case TRITONSERVER_PARAMETER_DOUBLE:
      writer.u8(static_cast<uint8_t>(ParameterKind::kDouble));
      return writer.f64(*static_cast<const double*>(value));
    default:
      throw BackendError(
          TRITONSERVER_ERROR_INVALID_ARG, std::string("request parameter '") + name + "' is of an unsupported type");
  }
}

}  // namespace

uint64_t next_handle() {
  static std::atomic<uint64_t> last{0};
  return ++last;
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
  check(TRITONBACKEND_InputBuffer(input, 0, &buffer, &size, &memory_type, &memory_id));
  if (size == sizeof handle && memory_type != TRITONSERVER_MEMORY_GPU) std::memcpy(&handle, buffer, sizeof handle);
  return handle;
}

std::string_view encode_request(FrameWriter& writer, uint64_t handle, TRITONBACKEND_Request* request) {
  const char* id;
  uint64_t timeout_us;
  uint32_t num_outputs, num_inputs, num_parameters;
  check(TRITONBACKEND_RequestId(request, &id));
  check(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(request, &timeout_us));
  check(TRITONBACKEND_RequestOutputCount(request, &num_outputs));
  check(TRITONBACKEND_RequestInputCount(request, &num_inputs));
  check(TRITONBACKEND_RequestParameterCount(request, &num_parameters));
  try {
    writer.begin(FrameType::kRequest);
    writer.u64(handle);
    writer.u64(realtime_ns());
    writer.u64(timeout_us);
    writer.str(id);
    writer.u16(static_cast<uint16_t>(num_outputs));
    for (uint32_t i = 0; i < num_outputs; ++i) {
      const char* name;
      check(TRITONBACKEND_RequestOutputName(request, i, &name));
      writer.str(name);
    }
    writer.u16(static_cast<uint16_t>(num_inputs));
    for (uint32_t i = 0; i < num_inputs; ++i) {
      TRITONBACKEND_Input* input;
      check(TRITONBACKEND_RequestInputByIndex(request, i, &input));
      write_input(writer, input);
    }
    writer.u16(static_cast<uint16_t>(num_parameters));
    for (uint32_t i = 0; i < num_parameters; ++i) write_parameter(writer, request, i);
    return writer.finish();
  } catch (const std::length_error& error) {
    throw BackendError(TRITONSERVER_ERROR_INVALID_ARG, error.what());
  }
}

}  // namespace slipstream
