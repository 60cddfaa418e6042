// Back-pressure for Triton's HTTP server, which loses responses when a backend sends in bursts.
//
// libevhtp hands each streamed response to one of its threads through a non-blocking unix socketpair and ignores that
// the write fails when the pair is full (about 277 hand-overs: 768 bytes of accounting each in a 212992-byte buffer).
// Nothing tells a backend which of its responses go over HTTP, so the pairs themselves are watched: before every 16th
// response of the process the send queues of its unnamed stream socketpairs are read, and sending waits while one is
// above a quarter full.  gRPC alone never fills one, so it pays the look and nothing else.  The looks take no lock: a
// thread waits only for a queue, never for another thread that waits or that looks for the pairs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
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
    const int fd;
    const uint64_t inode;
    const int limit_bytes;
    std::atomic<bool> is_stuck{false};
    Pair(int fd, uint64_t inode, int limit_bytes) : fd(fd), inode(inode), limit_bytes(limit_bytes) {}
  };
  using Pairs = std::vector<std::shared_ptr<Pair>>;

  void wait_for_room();
  void rescan_if_due();
  static Pair* over_limit(const Pairs& pairs);

  std::atomic<uint64_t> num_sent_{0};
  std::shared_ptr<const Pairs> pairs_ = std::make_shared<Pairs>();  // replaced as a whole: std::atomic_load, _store
  std::atomic<bool> was_logged_{false};
  std::mutex scan_mutex_;  // of what follows; whoever finds it taken goes on without a scan
  std::atomic<Clock::time_point> next_scan_{Clock::time_point{}};
  Clock::duration scan_period_{};
};

}  // namespace slipstream
