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

constexpr auto kScanPeriod = std::chrono::seconds(1);
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

}  // namespace

// The HTTP server starts after the models have loaded, hence again and again while responses flow.
void HttpPacer::rescan() {
  std::vector<Pair> found;
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const int fd = atoi(entry->d_name);
    struct stat info{};
    if (entry->d_name[0] == '.' || fstat(fd, &info) != 0 || !S_ISSOCK(info.st_mode) || !is_socketpair_end(fd)) continue;
    int send_buffer = 0;
    socklen_t size = sizeof send_buffer;
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, &size) != 0) continue;
    found.push_back({fd, info.st_ino, send_buffer / kShareOfBuffer});
  }
  closedir(directory);
  for (Pair& pair : found) {
    for (const Pair& known : pairs_) {
      if (known.inode == pair.inode) pair.is_stuck = known.is_stuck;
    }
  }
  pairs_.swap(found);
}

// A pair above its limit, or nullptr.  A descriptor closed since the last scan fails the ioctl, which is no harm.
HttpPacer::Pair* HttpPacer::over_limit() {
  for (Pair& pair : pairs_) {
    int queued = 0;
    if (ioctl(pair.fd, SIOCOUTQ, &queued) != 0) continue;
    if (queued <= pair.limit_bytes) pair.is_stuck = false;
    if (queued > pair.limit_bytes && !pair.is_stuck) return &pair;
  }
  return nullptr;
}

void HttpPacer::wait_for_room() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point started = Clock::now();
  if (started >= next_scan_) {
    rescan();
    next_scan_ = started + kScanPeriod;
  }
  while (Pair* full = over_limit()) {
    if (!was_logged_) log_info("HTTP streaming is paced: a hand-over queue of Triton's HTTP server fills up");
    was_logged_ = true;
    if (Clock::now() - started > kLongestWait) {
      full->is_stuck = true;  // nobody reads it: not the HTTP server's, or it hangs
      log_warning("a socketpair of the server stays full; it is no longer waited for");
      return;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace slipstream
