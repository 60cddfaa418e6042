// The C++ end of the protocol against the golden bytes.
//
//   wire_golden FRAMES.TXT
// prints what it encodes ("name hex") and what it decodes (one line per fact); test_wire_cpp.py compares.
#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "wire.h"

using namespace slipstream;

static std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoul(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

static void print_hex(const char* name, std::string_view bytes) {
  std::printf("%s ", name);
  for (const char byte : bytes) std::printf("%02x", static_cast<unsigned char>(byte));
  std::printf("\n");
}

static void encode_request_sample(FrameWriter& writer) {
  writer.begin(FrameType::kRequest);
  writer.u64(0x0102030405060708);
  writer.u64(1700000000123456789);
  writer.u64(2500000);
  writer.str("r\xc3\xa9q-1");
  writer.u16(2);
  writer.str("text_output");
  writer.str("finish_reason");
  writer.u16(3);
  writer.str("text_input");
  writer.u8(13);
  writer.u8(2);
  writer.i64(1);
  writer.i64(1);
  writer.text(std::string("\x06\0\0\0h\xc3\xa9llo", 10));
  writer.str("max_tokens");
  writer.u8(8);
  writer.u8(1);
  writer.i64(1);
  writer.text(std::string("\x10\0\0\0", 4));
  writer.str("empty");
  writer.u8(9);
  writer.u8(2);
  writer.i64(1);
  writer.i64(0);
  writer.text("");
  writer.u16(4);
  writer.str("schema");
  writer.u8(static_cast<uint8_t>(ParameterKind::kString));
  writer.text("{\"a\":1}");
  writer.str("priority");
  writer.u8(static_cast<uint8_t>(ParameterKind::kInt));
  writer.i64(-2);
  writer.str("stream");
  writer.u8(static_cast<uint8_t>(ParameterKind::kBool));
  writer.u8(1);
  writer.str("temperature");
  writer.u8(static_cast<uint8_t>(ParameterKind::kDouble));
  writer.f64(0.5);
}

static void print_ready(const ReadyFrame& ready) {
  for (const OutputSpec& output : ready.outputs) std::printf("output %s %d\n", output.name.c_str(), output.dtype);
  for (const MetricSpec& metric : ready.metrics) {
    std::printf("metric %s %d %s", metric.family.c_str(), static_cast<int>(metric.kind), metric.help.c_str());
    for (const auto& [name, value] : metric.labels) std::printf(" %s=%s", name.c_str(), value.c_str());
    for (const double bound : metric.bounds) std::printf(" %g", bound);
    std::printf("\n");
  }
}

static void print_responses(std::string_view payload) {
  PayloadReader reader(payload);
  ResponseView response;
  for (uint32_t left = reader.u32(); left > 0; --left) {
    decode_response(reader, response);
    std::printf("response %d flags %d", static_cast<int>(response.handle), response.flags);
    if (response.flags & kFlagError) {
      std::printf(
          " error %d %.*s", response.error_code, static_cast<int>(response.error_message.size()),
          response.error_message.data());
    }
    for (const ResponseView::Output& output : response.outputs) {
      std::printf(" | %d", output.index);
      for (int axis = 0; axis < output.rank; ++axis) std::printf(" %d", static_cast<int>(output.shape[axis]));
      std::printf(" : %zu bytes", output.data.size());
    }
    std::printf("\n");
  }
  reader.finish();
}

// How many of the damaged forms of a payload are refused: every truncation, and one byte too many.
template <typename Decode>
static void print_refusals(const char* name, std::string_view payload, Decode decode) {
  size_t refused = 0;
  const std::string longer = std::string(payload) + '\0';
  for (size_t size = 0; size <= longer.size(); ++size) {
    try {
      decode(std::string_view(longer).substr(0, size));
    } catch (const ProtocolError&) {
      ++refused;
    }
  }
  std::printf("refused %s %zu of %zu\n", name, refused, longer.size() + 1);
}

// A number that its field cannot hold is refused, never cut.
template <typename Write>
static void print_overflow(const char* name, Write write) {
  FrameWriter writer;
  writer.begin(FrameType::kRequest);
  try {
    write(writer);
    std::printf("cut %s\n", name);
  } catch (const std::length_error& error) {
    std::printf("overflow %s: %s\n", name, error.what());
  }
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::map<std::string, std::string> golden;
  std::ifstream file(argv[1]);
  for (std::string name, digits; file >> name >> digits;) golden[name] = from_hex(digits);

  FrameWriter writer;
  print_hex("config", encode_config(writer, "llm", 3, "/models/llm", "{\"name\":\"llm\",\"max_batch_size\":0}"));
  encode_request_sample(writer);
  print_hex("request", writer.finish());
  print_hex("cancel", encode_cancel(writer, 0xFFFFFFFFFFFFFFFE));
  print_hex("drain", encode_drain(writer, 60000));

  for (const char* name : {"hello", "ready", "load_failed", "responses", "metrics", "drained"}) {
    const auto [type, length] = decode_frame_header(golden[name].data());
    std::printf("header %s %d %zu\n", name, static_cast<int>(type), length);
  }
  const auto payload = [&](const char* name) { return std::string_view(golden[name]).substr(kFrameHeaderBytes); };
  std::string token;
  for (char byte = 0; byte < 16; ++byte) token += byte;
  std::printf(
      "hello %d %d\n", is_hello(FrameType::kHello, payload("hello"), token),
      is_hello(FrameType::kHello, payload("hello"), std::string(16, 'x')));
  print_ready(decode_ready(payload("ready")));
  print_responses(payload("responses"));
  print_refusals("ready", payload("ready"), [](std::string_view bytes) { decode_ready(bytes); });
  print_overflow("count8", [](FrameWriter& writer) { writer.count8(256); });
  print_overflow("count16", [](FrameWriter& writer) { writer.count16(65536); });
  print_overflow("count32", [](FrameWriter& writer) { writer.count32(size_t{1} << 32); });
  print_overflow("str", [](FrameWriter& writer) { writer.str(std::string(65536, 'x')); });
  for (const char* header : {"\0\0\0\0\x63", "\x01\0\0\x10\x0c", "\0\0\0\0\x03"}) {
    try {
      decode_frame_header(header);
      std::printf("accepted a bad header\n");
    } catch (const ProtocolError& error) {
      std::printf("bad header: %s\n", error.what());
    }
  }
}
