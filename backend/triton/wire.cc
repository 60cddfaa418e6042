#include "wire.h"

namespace slipstream {

std::string_view encode_config(
    FrameWriter& writer, std::string_view model_name, uint64_t version, std::string_view model_dir,
    std::string_view config_json) {
  writer.begin(FrameType::kConfig);
  writer.str(model_name);
  writer.u64(version);
  writer.text(model_dir);
  writer.text(config_json);
  return writer.finish();
}

std::string_view encode_cancel(FrameWriter& writer, uint64_t handle) {
  writer.begin(FrameType::kCancel);
  writer.u64(handle);
  return writer.finish();
}

std::string_view encode_drain(FrameWriter& writer, uint32_t deadline_ms) {
  writer.begin(FrameType::kDrain);
  writer.u32(deadline_ms);
  return writer.finish();
}

std::pair<FrameType, size_t> decode_frame_header(const char* header) {
  uint32_t length;
  std::memcpy(&length, header, sizeof length);
  const FrameType type = static_cast<FrameType>(static_cast<uint8_t>(header[4]));
  switch (type) {
    case FrameType::kHello:
    case FrameType::kReady:
    case FrameType::kLoadFailed:
    case FrameType::kResponses:
    case FrameType::kMetrics:
    case FrameType::kDrained:
      break;
    default:
      throw ProtocolError("unknown frame type " + std::to_string(static_cast<int>(type)));
  }
  if (length > kMaxPayloadBytes) throw ProtocolError("a frame of " + std::to_string(length) + " bytes is too long");
  return {type, length};
}

bool is_hello(FrameType type, std::string_view payload, std::string_view token) {
  if (type != FrameType::kHello || payload.size() != kHelloPayloadBytes) return false;
  PayloadReader reader(payload);
  if (reader.take(4) != "SLIP" || reader.u16() != kProtocolVersion) return false;
  return reader.take(kTokenBytes) == token;
}

static MetricSpec decode_metric_spec(PayloadReader& reader) {
  MetricSpec metric;
  metric.family = reader.str();
  const uint8_t kind = reader.u8();
  if (kind > static_cast<uint8_t>(MetricKind::kHistogram)) throw ProtocolError("unknown metric kind");
  metric.kind = static_cast<MetricKind>(kind);
  metric.help = reader.str();
  for (uint16_t left = reader.u16(); left > 0; --left) {
    const std::string_view name = reader.str();
    metric.labels.emplace_back(name, reader.str());
  }
  for (uint16_t left = reader.u16(); left > 0; --left) metric.bounds.push_back(reader.f64());
  return metric;
}

ReadyFrame decode_ready(std::string_view payload) {
  PayloadReader reader(payload);
  ReadyFrame ready;
  for (uint16_t left = reader.u16(); left > 0; --left) {
    const std::string_view name = reader.str();
    const uint8_t dtype = reader.u8();
    if (dtype == 0 || dtype > kLastDataType) throw ProtocolError("unknown data type");
    ready.outputs.push_back({std::string(name), dtype});
  }
  for (uint16_t left = reader.u16(); left > 0; --left) ready.metrics.push_back(decode_metric_spec(reader));
  reader.finish();
  return ready;
}

void decode_response(PayloadReader& reader, ResponseView& response) {
  response.handle = reader.u64();
  response.flags = reader.u8();
  response.outputs.clear();
  if (response.flags & kFlagError) {
    response.error_code = reader.u8();
    if (response.error_code > kLastErrorCode) throw ProtocolError("unknown error code");
    response.error_message = reader.text();
    return;
  }
  if (response.flags & kFlagEmpty) return;
  for (uint8_t left = reader.u8(); left > 0; --left) {
    response.outputs.emplace_back();
    ResponseView::Output& output = response.outputs.back();
    output.index = reader.u8();
    output.rank = reader.u8();
    if (output.rank > kMaxRank) throw ProtocolError("an output has more than 32 dimensions");
    for (uint8_t axis = 0; axis < output.rank; ++axis) output.shape[axis] = reader.i64();
    output.data = reader.text();
  }
}

}  // namespace slipstream
