// Frames between this backend and the engine process: the C++ end of slipstream/protocol/wire.py.
//
// Little endian; frame = u32 payload length, u8 type, payload; `str` = u16 length + UTF-8, `text` = u32 length + bytes.
// No I/O and nothing of Triton here, so that tests/golden can be checked by a small program.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace slipstream {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the frames are copied as they lie in memory");

enum class FrameType : uint8_t {
  kHello = 1,
  kConfig = 2,
  kRequest = 3,
  kCancel = 4,
  kDrain = 5,
  kReady = 10,
  kLoadFailed = 11,
  kResponses = 12,
  kMetrics = 13,
  kDrained = 14,
};

constexpr size_t kFrameHeaderBytes = 5;
constexpr size_t kMaxPayloadBytes = 256u << 20;
constexpr size_t kKeptWriterBytes = 1u << 20;
constexpr uint16_t kProtocolVersion = 1;
constexpr size_t kTokenBytes = 16;
constexpr size_t kHelloPayloadBytes = 4 + 2 + kTokenBytes;
constexpr size_t kMaxRank = 32;
constexpr uint8_t kLastErrorCode = 7;  // TRITONSERVER_ERROR_CANCELLED
constexpr uint8_t kLastDataType = 14;  // TRITONSERVER_TYPE_BF16

constexpr uint8_t kFlagFinal = 1;
constexpr uint8_t kFlagError = 2;
constexpr uint8_t kFlagEmpty = 4;

enum class ParameterKind : uint8_t { kString = 0, kInt = 1, kBool = 2, kDouble = 3 };
enum class MetricKind : uint8_t { kCounter = 0, kGauge = 1, kHistogram = 2 };

// The engine sent bytes that are no valid frame: it cannot be trusted any more.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Builds one frame; reuse it: the buffer keeps its capacity, up to kKeptWriterBytes.
// A count or length that its field cannot hold throws std::length_error: nothing is ever cut to fit.
class FrameWriter {
 public:
  void begin(FrameType type) {
    if (buffer_.capacity() > kKeptWriterBytes) std::string().swap(buffer_);
    buffer_.assign(4, '\0');
    u8(static_cast<uint8_t>(type));
  }
  void u8(uint8_t value) { buffer_.push_back(static_cast<char>(value)); }
  void u16(uint16_t value) { raw(&value, sizeof value); }
  void u32(uint32_t value) { raw(&value, sizeof value); }
  void u64(uint64_t value) { raw(&value, sizeof value); }
  void i64(int64_t value) { raw(&value, sizeof value); }
  void f64(double value) { raw(&value, sizeof value); }
  void count8(size_t value) { u8(checked<uint8_t>(value)); }
  void count16(size_t value) { u16(checked<uint16_t>(value)); }
  void count32(size_t value) { u32(checked<uint32_t>(value)); }
  void str(std::string_view value) {
    count16(value.size());
    raw(value.data(), value.size());
  }
  void text(std::string_view value) {
    count32(value.size());
    raw(value.data(), value.size());
  }
  void raw(const void* data, size_t size) { buffer_.append(static_cast<const char*>(data), size); }

  // The whole frame, valid until the next begin().  Throws std::length_error above kMaxPayloadBytes.
  std::string_view finish() {
    const size_t payload = buffer_.size() - kFrameHeaderBytes;
    if (payload > kMaxPayloadBytes) throw std::length_error("a frame would be longer than 256 MiB");
    const uint32_t length = static_cast<uint32_t>(payload);
    std::memcpy(&buffer_[0], &length, sizeof length);
    return buffer_;
  }
  // The finished REQUEST frame under another handle, its first field.
  std::string_view with_handle(uint64_t handle) {
    std::memcpy(&buffer_[kFrameHeaderBytes], &handle, sizeof handle);
    return buffer_;
  }

 private:
  template <typename Field>
  static Field checked(size_t value) {
    if (value > std::numeric_limits<Field>::max()) {
      throw std::length_error(
          "a frame's field holds at most " + std::to_string(std::numeric_limits<Field>::max()) + ", got " +
          std::to_string(value));
    }
    return static_cast<Field>(value);
  }
  std::string buffer_;
};

// A bounds-checked cursor over one payload; views point into the payload.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view payload) : at_(payload.data()), end_(payload.data() + payload.size()) {}
  uint8_t u8() { return number<uint8_t>(); }
  uint16_t u16() { return number<uint16_t>(); }
  uint32_t u32() { return number<uint32_t>(); }
  uint64_t u64() { return number<uint64_t>(); }
  int64_t i64() { return number<int64_t>(); }
  double f64() { return number<double>(); }
  std::string_view str() { return take(u16()); }
  std::string_view text() { return take(u32()); }
  std::string_view take(size_t size) {
    if (size > static_cast<size_t>(end_ - at_)) throw ProtocolError("a payload ends inside a field");
    std::string_view data(at_, size);
    at_ += size;
    return data;
  }
  void finish() const {
    if (at_ != end_) throw ProtocolError("bytes are left over at the end of a payload");
  }

 private:
  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  const char* at_;
  const char* end_;
};

struct OutputSpec {
  std::string name;
  uint8_t dtype;
};

struct MetricSpec {
  std::string family;
  MetricKind kind;
  std::string help;
  std::vector<std::pair<std::string, std::string>> labels;
  std::vector<double> bounds;
};

struct ReadyFrame {
  std::vector<OutputSpec> outputs;
  std::vector<MetricSpec> metrics;
};

// One entry of RESPONSES; views point into the frame.
struct ResponseView {
  struct Output {
    uint8_t index;
    uint8_t rank;
    int64_t shape[kMaxRank];
    std::string_view data;
  };
  uint64_t handle = 0;
  uint8_t flags = 0;
  uint8_t error_code = 0;
  std::string_view error_message;
  std::vector<Output> outputs;

  bool is_final() const { return (flags & kFlagFinal) != 0; }
};

std::string_view encode_config(
    FrameWriter& writer, std::string_view model_name, uint64_t version, std::string_view model_dir,
    std::string_view config_json);
std::string_view encode_cancel(FrameWriter& writer, uint64_t handle);
std::string_view encode_drain(FrameWriter& writer, uint32_t deadline_ms);

// The type of the frame that begins at `header` (5 bytes) and its payload length.  Throws ProtocolError.
std::pair<FrameType, size_t> decode_frame_header(const char* header);

// Whether this is a valid HELLO carrying the token (16 bytes).
bool is_hello(FrameType type, std::string_view payload, std::string_view token);
ReadyFrame decode_ready(std::string_view payload);
void decode_response(PayloadReader& reader, ResponseView& response);

}  // namespace slipstream
