#include "pacing.h"

#include <dirent.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

#include "status.h"

namespace slipstream {
namespace {

constexpr auto kShortestScanPeriod = std::chrono::seconds(1);
constexpr auto kLongestScanPeriod = std::chrono::seconds(8);
constexpr auto kPause = std::chrono::microseconds(100);
constexpr auto kLongestWait = std::chrono::seconds(2);
constexpr int kShareOfBuffer = 4;  // wait above 1/4: three quarters are left for what other threads send meanwhile

bool option_is(int fd, int option, int wanted) {
  int value = -1;
  socklen_t size = sizeof value;
  return getsockopt(fd, SOL_SOCKET, option, &value, &size) == 0 && value == wanted;
}

bool is_unnamed(int fd, int (*name_of)(int, sockaddr*, socklen_t*)) {
  sockaddr_un address{};
  socklen_t size = sizeof address;
  return name_of(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 && size == sizeof(sa_family_t);
}

// A connected end of an unnamed AF_UNIX stream socketpair.  Our own connection to the engine has a name, its path.
bool is_socketpair_end(int fd) {
  return option_is(fd, SO_DOMAIN, AF_UNIX) && option_is(fd, SO_TYPE, SOCK_STREAM) &&
         is_unnamed(fd, [](int f, sockaddr* a, socklen_t* s) { return getsockname(f, a, s); }) &&
         is_unnamed(fd, [](int f, sockaddr* a, socklen_t* s) { return getpeername(f, a, s); });
}

std::vector<int> open_sockets() {
  std::vector<int> sockets;
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return sockets;
  while (const dirent* entry = readdir(directory)) {
    const int fd = atoi(entry->d_name);
    struct stat info{};
    if (entry->d_name[0] != '.' && fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode)) sockets.push_back(fd);
  }
  closedir(directory);
  return sockets;
}

}  // namespace

// The HTTP server starts after the models have loaded, hence again and again while responses flow: each second at first,
// then less often while nothing changes, as a look at thousands of connections takes milliseconds.
void HttpPacer::rescan_if_due() {
  const Clock::time_point now = Clock::now();
  if (now < next_scan_.load(std::memory_order_relaxed)) return;
  const std::unique_lock<std::mutex> lock(scan_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || now < next_scan_.load()) return;
  const auto known = std::atomic_load(&pairs_);
  auto found = std::make_shared<Pairs>();
  for (const int fd : open_sockets()) {
    struct stat info{};
    int send_buffer = 0;
    socklen_t size = sizeof send_buffer;
    if (!is_socketpair_end(fd) || fstat(fd, &info) != 0) continue;
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, &size) != 0) continue;
    const auto same = std::find_if(known->begin(), known->end(), [&](const std::shared_ptr<Pair>& pair) {
      return pair->fd == fd && pair->inode == info.st_ino;
    });
    const bool is_known = same != known->end();
    found->push_back(is_known ? *same : std::make_shared<Pair>(fd, info.st_ino, send_buffer / kShareOfBuffer));
  }
  const bool is_unchanged = scan_period_ != Clock::duration{} && *found == *known;
  scan_period_ = is_unchanged ? std::min<Clock::duration>(2 * scan_period_, kLongestScanPeriod) : kShortestScanPeriod;
  std::atomic_store(&pairs_, std::shared_ptr<const Pairs>(std::move(found)));
  next_scan_ = now + scan_period_;
}

// A pair above its limit, or nullptr.  A descriptor closed since the last scan fails the ioctl, which is no harm.
HttpPacer::Pair* HttpPacer::over_limit(const Pairs& pairs) {
  for (const std::shared_ptr<Pair>& pair : pairs) {
    int queued = 0;
    if (ioctl(pair->fd, SIOCOUTQ, &queued) != 0) continue;
    if (queued <= pair->limit_bytes) pair->is_stuck = false;
    if (queued > pair->limit_bytes && !pair->is_stuck) return pair.get();
  }
  return nullptr;
}

void HttpPacer::wait_for_room() {
  rescan_if_due();
  const auto pairs = std::atomic_load(&pairs_);
  const Clock::time_point started = Clock::now();
  while (Pair* full = over_limit(*pairs)) {
    if (!was_logged_.exchange(true)) log_info("HTTP streaming is paced: a hand-over queue of Triton's HTTP server fills up");
    if (Clock::now() - started > kLongestWait) {
      full->is_stuck = true;  // nobody reads it: not the HTTP server's, or it hangs
      log_warning("a socketpair of the server stays full; it is no longer waited for");
      return;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace slipstream
