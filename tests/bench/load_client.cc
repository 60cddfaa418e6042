// N concurrent ModelStreamInfer calls over raw bytes, one thread, one completion queue: a client cheap enough (3-10 us
// a message) not to be what is measured.  Counts messages; prints one line of JSON.
//
//   load_client ADDRESS REQUEST_FILE STREAMS REQUESTS_PER_STREAM RESPONSES_PER_REQUEST TIMEOUT_S
// REQUEST_FILE holds one serialised ModelInferRequest.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMethod[] = "/inference.GRPCInferenceService/ModelStreamInfer";
constexpr int kNumChannels = 4;
enum Operation : intptr_t { kStart, kWrite, kRead, kFinish, kNumOperations };

struct Stream {
  grpc::ClientContext context;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
  grpc::ByteBuffer message;
  grpc::Status status;
  Clock::time_point sent_at, last_at;
  long num_responses = 0, num_requests = 0;
  bool is_finishing = false;
};

struct Options {
  std::string address, request;
  int num_streams, num_requests, num_responses;
  double timeout_s;
};

struct Totals {
  long num_messages = 0, num_errors = 0, num_unfinished = 0;
  std::vector<float> first_ms, next_ms;
  Clock::time_point last;
};

double percentile(std::vector<float>& values, double share) {
  if (values.empty()) return 0;
  const size_t rank = std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<long>(rank), values.end());
  return values[rank];
}

// ModelStreamInferResponse: field 1 is error_message, field 2 infer_response.
bool is_error(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  return message.Dump(&slices).ok() && !slices.empty() && slices[0].size() > 0 && slices[0].begin()[0] == 0x0a;
}

class LoadClient {
 public:
  explicit LoadClient(Options options) : options_(std::move(options)), streams_(options_.num_streams) {
    grpc::Slice slice(options_.request);
    request_ = grpc::ByteBuffer(&slice, 1);
    for (int i = 0; i < kNumChannels; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      auto channel = grpc::CreateCustomChannel(options_.address, grpc::InsecureChannelCredentials(), arguments);
      channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(5));
      stubs_.push_back(std::make_unique<grpc::GenericStub>(channel));
    }
  }

  Totals run() {
    const auto give_up =
        std::chrono::system_clock::now() + std::chrono::milliseconds(static_cast<long>(options_.timeout_s * 1000));
    for (size_t i = 0; i < streams_.size(); ++i) {
      streams_[i].call = stubs_[i % kNumChannels]->PrepareCall(&streams_[i].context, kMethod, &queue_);
      streams_[i].call->StartCall(tag(i, kStart));
    }
    void* done;
    bool ok;
    size_t num_live = streams_.size();
    while (num_live > 0 && queue_.AsyncNext(&done, &ok, give_up) == grpc::CompletionQueue::GOT_EVENT) {
      const intptr_t value = reinterpret_cast<intptr_t>(done);
      const auto index = static_cast<size_t>(value / kNumOperations);
      if (advance(index, static_cast<Operation>(value % kNumOperations), ok)) --num_live;
    }
    totals_.num_unfinished = static_cast<long>(num_live);
    return totals_;
  }

 private:
  static void* tag(size_t stream, Operation operation) {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream) * kNumOperations + operation);
  }

  // True when the stream has ended.
  bool advance(size_t index, Operation operation, bool ok) {
    Stream& stream = streams_[index];
    if (operation == kFinish) {
      if (!stream.status.ok()) ++totals_.num_errors;
      return true;
    }
    if (!ok) {
      finish(index);
    } else if (operation == kStart) {
      send_request(index);
    } else if (operation == kRead) {
      on_message(index);
    }
    return false;
  }

  void send_request(size_t index) {
    Stream& stream = streams_[index];
    stream.num_responses = 0;
    stream.sent_at = Clock::now();
    stream.call->Write(request_, tag(index, kWrite));
    stream.call->Read(&stream.message, tag(index, kRead));
  }

  void on_message(size_t index) {
    Stream& stream = streams_[index];
    const auto now = Clock::now();
    const auto since = now - (stream.num_responses == 0 ? stream.sent_at : stream.last_at);
    auto& sample = stream.num_responses == 0 ? totals_.first_ms : totals_.next_ms;
    sample.push_back(std::chrono::duration<float, std::milli>(since).count());
    totals_.last = stream.last_at = now;
    ++totals_.num_messages;
    if (is_error(stream.message)) {
      ++totals_.num_errors;
      return finish(index);
    }
    if (++stream.num_responses < options_.num_responses) {
      stream.call->Read(&stream.message, tag(index, kRead));
    } else if (++stream.num_requests < options_.num_requests) {
      send_request(index);
    } else {
      stream.call->WritesDone(tag(index, kWrite));
      finish(index);
    }
  }

  void finish(size_t index) {
    Stream& stream = streams_[index];
    if (stream.is_finishing) return;
    stream.is_finishing = true;
    stream.call->Finish(&stream.status, tag(index, kFinish));
  }

  const Options options_;
  grpc::CompletionQueue queue_;
  grpc::ByteBuffer request_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  std::vector<Stream> streams_;
  Totals totals_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: load_client ADDRESS REQUEST_FILE STREAMS REQUESTS RESPONSES TIMEOUT_S\n");
    return 2;
  }
  std::ifstream file(argv[2], std::ios::binary);
  const std::string request{std::istreambuf_iterator<char>(file), {}};
  LoadClient client({argv[1], request, atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atof(argv[6])});
  const auto started = Clock::now();
  Totals totals = client.run();
  const double seconds = std::chrono::duration<double>(totals.last - started).count();
  std::printf(
      "{\"messages\": %ld, \"errors\": %ld, \"unfinished\": %ld, \"seconds\": %.4f, \"responses_per_s\": %.0f, "
      "\"first_ms_p50\": %.3f, \"next_ms_p50\": %.3f, \"next_ms_p99\": %.3f}\n",
      totals.num_messages, totals.num_errors, totals.num_unfinished, seconds,
      static_cast<double>(totals.num_messages) / seconds, percentile(totals.first_ms, 0.5),
      percentile(totals.next_ms, 0.5), percentile(totals.next_ms, 0.99));
  std::fflush(stdout);
  _Exit(totals.num_unfinished == 0 ? 0 : 1);  // without waiting for what the server still holds
}
