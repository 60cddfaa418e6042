// libFuzzer: any request of Triton's -> a REQUEST frame that says exactly what the request holds, or a refusal.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>

#include "fake_api.h"
#include "request.h"
#include "routing.h"
#include "status.h"

using namespace slipstream;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

std::string any_name(FuzzedDataProvider& data) {
  static const size_t kLong[] = {256, 257, 1024, 1025, 65536};
  if (data.ConsumeIntegralInRange(0, 127) == 127) return std::string(data.PickValueInArray(kLong), 'n');
  if (data.ConsumeIntegralInRange(0, 7) == 0) return "REQUEST_HANDLE";
  std::string name = data.ConsumeRandomLengthString(24);
  return name.substr(0, name.find('\0'));
}

// Mostly few; now and then about as many as a limit or a field of the frame holds.
size_t any_count(FuzzedDataProvider& data) {
  static const size_t kMany[] = {256, 257, 1024, 1025, 65600};
  if (data.ConsumeIntegralInRange(0, 255) == 255) return data.PickValueInArray(kMany);
  return data.ConsumeIntegralInRange<size_t>(0, 4);
}

TRITONBACKEND_Input any_input(FuzzedDataProvider& data) {
  TRITONBACKEND_Input input;
  input.name = any_name(data);
  input.dtype = static_cast<TRITONSERVER_DataType>(data.ConsumeIntegralInRange(0, 14));
  const size_t rank = data.ConsumeIntegralInRange(0, 31) == 0 ? data.ConsumeIntegralInRange<size_t>(30, 300)
                                                               : data.ConsumeIntegralInRange<size_t>(0, 3);
  for (size_t i = 0; i < rank; ++i) input.shape.push_back(data.ConsumeIntegral<int64_t>());
  const size_t num_buffers = data.ConsumeIntegralInRange<size_t>(0, 3);
  for (size_t i = 0; i < num_buffers; ++i) {
    input.buffers.push_back(data.ConsumeRandomLengthString(40));
    input.num_bytes += input.buffers.back().size();
  }
  if (data.ConsumeIntegralInRange(0, 15) == 0) input.num_bytes = data.ConsumeIntegral<uint64_t>();
  if (data.ConsumeIntegralInRange(0, 31) == 0) input.memory_type = TRITONSERVER_MEMORY_GPU;
  return input;
}

RequestParameter any_parameter(FuzzedDataProvider& data) {
  RequestParameter one;
  one.name = any_name(data);
  one.type = static_cast<TRITONSERVER_ParameterType>(data.ConsumeIntegralInRange(0, 5));
  one.text = data.ConsumeRandomLengthString(40);
  one.text.resize(one.text.find('\0') == std::string::npos ? one.text.size() : one.text.find('\0'));
  one.integer = data.ConsumeIntegral<int64_t>();
  one.truth = data.ConsumeBool();
  one.real = data.ConsumeFloatingPoint<double>();
  return one;
}

void check_input(PayloadReader& reader, const TRITONBACKEND_Input& input) {
  require(reader.str() == input.name);
  require(reader.u8() == static_cast<uint8_t>(input.dtype) && reader.u8() == input.shape.size());
  for (const int64_t size : input.shape) require(reader.i64() == size);
  const std::string_view bytes = reader.text();
  size_t at = 0;
  for (const std::string& buffer : input.buffers) {
    require(bytes.substr(at, buffer.size()) == buffer);
    at += buffer.size();
    if (at == bytes.size()) break;
  }
  require(at == bytes.size() && bytes.size() == input.num_bytes);
}

void check_parameter(PayloadReader& reader, const RequestParameter& one) {
  require(reader.str() == one.name);
  switch (static_cast<ParameterKind>(reader.u8())) {
    case ParameterKind::kString:
      return require(one.type == TRITONSERVER_PARAMETER_STRING && reader.text() == one.text);
    case ParameterKind::kInt:
      return require(one.type == TRITONSERVER_PARAMETER_INT && reader.i64() == one.integer);
    case ParameterKind::kBool:
      return require(one.type == TRITONSERVER_PARAMETER_BOOL && reader.u8() == (one.truth ? 1 : 0));
    case ParameterKind::kDouble: {
      const double real = reader.f64();
      return require(one.type == TRITONSERVER_PARAMETER_DOUBLE && std::memcmp(&real, &one.real, sizeof real) == 0);
    }
    default:
      require(false);
  }
}

void check_frame(std::string_view frame, uint64_t handle, const TRITONBACKEND_Request& request) {
  uint32_t length;
  std::memcpy(&length, frame.data(), sizeof length);
  require(length == frame.size() - kFrameHeaderBytes && frame[4] == static_cast<char>(FrameType::kRequest));
  PayloadReader reader(frame.substr(kFrameHeaderBytes));
  require(reader.u64() == handle && reader.u64() > 0 && reader.u64() == request.timeout_us);
  require(reader.str() == request.id);
  require(reader.u16() == request.outputs.size());
  for (const std::string& name : request.outputs) require(reader.str() == name);
  require(reader.u16() == request.inputs.size());
  for (const TRITONBACKEND_Input& input : request.inputs) check_input(reader, input);
  require(reader.u16() == request.parameters.size());
  for (const RequestParameter& one : request.parameters) check_parameter(reader, one);
  reader.finish();
  require(request.parameters.size() <= kMaxRequestParameters && request.id.size() <= kMaxRequestIdBytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  static FrameWriter writer;
  FuzzedDataProvider data(bytes, size);
  TRITONBACKEND_Request request;
  request.id = any_name(data);
  request.timeout_us = data.ConsumeIntegral<uint64_t>();
  const size_t num_outputs = any_count(data), num_inputs = any_count(data), num_parameters = any_count(data);
  for (size_t i = 0; i < num_outputs; ++i) request.outputs.push_back(any_name(data));
  for (size_t i = 0; i < num_inputs; ++i) request.inputs.push_back(any_input(data));
  for (size_t i = 0; i < num_parameters; ++i) request.parameters.push_back(any_parameter(data));
  const uint64_t handle = data.ConsumeIntegral<uint64_t>();
  upstream_handle(&request);
  try {
    check_frame(encode_request(writer, handle, &request), handle, request);
    const Command command = read_command(&request);
    require(command.is_control || !command.empties_caches);
    read_id_hash(&request);
    require(read_prompt(&request).size() <= kMostRoutedBytes / kBlockBytes);
  } catch (const BackendError& error) {
    require(error.code == TRITONSERVER_ERROR_INVALID_ARG || error.code == TRITONSERVER_ERROR_UNSUPPORTED);
  }
  return 0;
}
