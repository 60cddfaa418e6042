// A server that has used up its file descriptors or threads when an engine is to be started: what fails must give back
// what it took, else the server never recovers, and must not spin.  Prints what was lost, a line each.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "engine_process.h"
#include "engine_socket.h"

static bool has_threads = true;

extern "C" int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) noexcept {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return has_threads ? create(thread, attributes, body, argument) : EAGAIN;
}

namespace {

bool is_open(int fd) {
  return fcntl(fd, F_GETFD) >= 0;
}

int count_open() {
  int num_open = 0;
  for (int fd = 0; fd < 1024; ++fd) num_open += is_open(fd);
  return num_open;
}

// While it lives so many more descriptors can be opened.
class Limit {
 public:
  explicit Limit(int num_free) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit limit = before_;
    for (limit.rlim_cur = 0; num_free > 0 || is_open(static_cast<int>(limit.rlim_cur)); ++limit.rlim_cur) {
      num_free -= !is_open(static_cast<int>(limit.rlim_cur));
    }
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  ~Limit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

template <typename Body>
bool throws(int num_free, Body body) {
  Limit limit(num_free);
  try {
    body();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

void start_process() {
  slipstream::EngineProcess process({"/bin/true"}, "");
}

void connect_to(const std::string& path, int fd) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path + 1, path.size() - 1, 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) != 0) std::printf("no connection\n");
}

}  // namespace

int main() {
  start_process();  // threads and streams of the C library keep descriptors of their own
  const int before = count_open();
  for (int num_free = 0; num_free < 3; ++num_free) {
    if (!throws(num_free, start_process)) std::printf("a process started with %d descriptors\n", num_free);
    if (count_open() != before) std::printf("a process that did not start keeps a descriptor of %d\n", num_free);
  }
  has_threads = false;
  if (!throws(8, start_process)) std::printf("a process whose output nobody reads\n");
  has_threads = true;
  if (count_open() != before) std::printf("a process without a thread keeps a descriptor\n");
  if (waitpid(-1, nullptr, WNOHANG) != -1) std::printf("a process without a thread is not ended\n");
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  if (!throws(0, [&] { slipstream::EngineLink link(ends[0]); })) std::printf("a link without its eventfd\n");
  if (is_open(ends[0])) std::printf("a link that was not made keeps the connection\n");
  slipstream::EngineListener listener;
  connect_to(listener.path(), ends[1] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int num_left = 100;
  if (!throws(0, [&] { listener.accept_engine([&] { return --num_left > 0; }); })) {
    std::printf("a connection that cannot be accepted is waited for\n");
  }
  std::printf("done\n");
  return 0;
}
