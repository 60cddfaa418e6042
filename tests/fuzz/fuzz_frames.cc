// libFuzzer: any bytes as the stream of an engine: headers, HELLO, READY, RESPONSES to live requests, METRICS.
// A frame is used or refused with ProtocolError; every request still gets exactly one final response
// and is released once.
#include <cstdlib>
#include <deque>

#include "fake_api.h"
#include "live_requests.h"
#include "metrics.h"
#include "wire.h"

using namespace slipstream;

namespace {

constexpr uint64_t kNumRequests = 6;  // handles 1 to 6
constexpr uint64_t kNumAlone = 4;     // handles 5 and 6 are one request to two replicas

class Peer {
 public:
  Peer() : live_(pacer_), metrics_(registry_, {{"model", "llm"}}, reports_) {
    OpenRequest open;
    for (uint64_t handle = 1; handle <= kNumRequests; ++handle) {
      if (handle <= kNumAlone + 1) {
        open.request = &requests_.emplace_back();
        TRITONBACKEND_ResponseFactoryNew(&open.factory, open.request);
      }
      if (handle > kNumAlone) open.broadcast = broadcast_;
      live_.add(handle, open);
    }
  }

  // Throws ProtocolError, as the reader thread would see it.
  void feed(std::string_view stream) {
    while (stream.size() >= kFrameHeaderBytes) {
      const auto [type, length] = decode_frame_header(stream.data());
      stream.remove_prefix(kFrameHeaderBytes);
      if (length > stream.size()) return;
      use(type, stream.substr(0, length));
      stream.remove_prefix(length);
    }
  }

  void end() {
    live_.fail_all(TRITONSERVER_ERROR_UNAVAILABLE, "the engine is gone");
    for (const TRITONBACKEND_Request& request : requests_) {
      if (!request.client->has_ended || request.num_releases != 1) std::abort();
    }
  }

 private:
  void use(FrameType type, std::string_view payload) {
    is_hello(type, payload, "0123456789abcdef");
    if (type == FrameType::kLoadFailed) PayloadReader(payload).text();
    if (type == FrameType::kMetrics) metrics_.record(payload);
    if (type == FrameType::kReady) {
      ReadyFrame ready = decode_ready(payload);
      outputs_ = std::move(ready.outputs);
      metrics_.declare(ready.metrics);
    }
    if (type != FrameType::kResponses) return;
    PayloadReader reader(payload);
    for (uint32_t left = reader.u32(); left > 0; --left) {
      decode_response(reader, response_);
      live_.respond(response_, outputs_);
    }
    reader.finish();
  }

  HttpPacer pacer_;
  LiveRequests live_;
  std::shared_ptr<Broadcast> broadcast_ = std::make_shared<Broadcast>(kNumRequests - kNumAlone);
  MetricRegistry registry_;
  EngineReports reports_;
  ModelMetrics metrics_;
  std::deque<TRITONBACKEND_Request> requests_;
  std::vector<OutputSpec> outputs_;
  ResponseView response_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Peer peer;
  try {
    peer.feed({reinterpret_cast<const char*>(bytes), size});
  } catch (const ProtocolError&) {
  }
  peer.end();
  return 0;
}
