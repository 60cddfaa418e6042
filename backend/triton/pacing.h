// Back-pressure for Triton's HTTP server, which loses responses when a backend sends in bursts.
//
// libevhtp hands each streamed response to one of its threads through a non-blocking unix socketpair and ignores that
// the write fails when the pair is full (about 277 hand-overs: 768 bytes of accounting each in a 212992-byte buffer).
// Nothing tells a backend which of its responses go over HTTP, so the pairs themselves are watched: before every 16th
// response of the process the send queues of its unnamed stream socketpairs are read, and sending waits while one is
// above a quarter full.  gRPC alone never fills one, so it pays the look and nothing else.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace slipstream {

class HttpPacer {
 public:
  // Any thread, before each response; cheap except for every 16th.
  void before_send() {
    if ((num_sent_.fetch_add(1, std::memory_order_relaxed) & kMask) == 0) wait_for_room();
  }

 private:
  static constexpr uint64_t kMask = 15;
  using Clock = std::chrono::steady_clock;
  struct Pair {
    int fd;
    uint64_t inode;
    int limit_bytes;
    bool is_stuck = false;
  };

  void wait_for_room();
  void rescan();
  Pair* over_limit();

  std::atomic<uint64_t> num_sent_{0};
  std::mutex mutex_;
  Clock::time_point next_scan_{};
  std::vector<Pair> pairs_;
  bool was_logged_ = false;
};

}  // namespace slipstream
