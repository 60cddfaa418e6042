#include "engine_socket.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "status.h"

namespace slipstream {
namespace {

constexpr size_t kReceiveBytes = 1 << 20;
constexpr size_t kMaxCandidates = 16;

// to_close: a descriptor that nobody else would close; -1 for none.
[[noreturn]] void fail(const char* what, int to_close = -1) {
  const std::system_error error(errno, std::generic_category(), what);
  if (to_close >= 0) close(to_close);
  throw error;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (getrandom(&bytes[0], count, 0) != static_cast<ssize_t>(count)) fail("getrandom");
  return bytes;
}

std::string to_hex(const std::string& bytes) {
  static const char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const char byte : bytes) {
    hex += kDigits[static_cast<unsigned char>(byte) >> 4];
    hex += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return hex;
}

// An abstract name has no permissions: only processes of the server's own user get as far as a hello.
bool is_of_our_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

}  // namespace

EngineListener::EngineListener() : path_("@slipstream-" + to_hex(random_bytes(8))), token_(random_bytes(kTokenBytes)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(path_.begin() + 1, path_.end(), address.sun_path + 1);  // the '@' stands for a zero byte
  const socklen_t size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path_.size());
  fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0 || bind(fd_, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(fd_, 64) != 0) {
    fail(path_.c_str(), fd_);
  }
}

EngineListener::~EngineListener() {
  for (const Candidate& candidate : candidates_) close(candidate.fd);
  close(fd_);
}

std::string EngineListener::token_hex() const {
  return to_hex(token_);
}

int EngineListener::accept_engine(const std::function<bool()>& keep_waiting) {
  while (keep_waiting()) {
    std::vector<pollfd> waiting{{fd_, POLLIN, 0}};
    for (const Candidate& candidate : candidates_) waiting.push_back({candidate.fd, POLLIN, 0});
    if (poll(waiting.data(), waiting.size(), 50) <= 0) continue;
    for (size_t i = waiting.size() - 1; i > 0; --i) {  // backwards: candidates are erased on the way
      if (waiting[i].revents == 0) continue;
      Candidate& candidate = candidates_[i - 1];
      const Verdict verdict = examine(candidate);
      if (verdict == Verdict::kUndecided) continue;
      const int fd = candidate.fd;
      candidates_.erase(candidates_.begin() + static_cast<long>(i) - 1);
      if (verdict == Verdict::kEngine) return fd;
      log_warning("closed a connection to " + path_ + " that did not say hello as the engine");
      close(fd);
    }
    add_candidate();
  }
  return -1;
}

void EngineListener::add_candidate() {
  const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) fail("accept");  // waiting would not wait: it stays to be accepted
  if (fd < 0) return;
  if (!is_of_our_user(fd)) {
    log_warning("closed a connection to " + path_ + " of another user");
    close(fd);
    return;
  }
  if (candidates_.size() == kMaxCandidates) {
    close(candidates_.front().fd);
    candidates_.erase(candidates_.begin());
  }
  candidates_.push_back({fd, ""});
}

// Reads no further than one HELLO, so that nothing after it is lost.
EngineListener::Verdict EngineListener::examine(Candidate& candidate) {
  constexpr size_t kHelloBytes = kFrameHeaderBytes + kHelloPayloadBytes;
  char chunk[kHelloBytes];
  const ssize_t got = recv(candidate.fd, chunk, kHelloBytes - candidate.received.size(), MSG_DONTWAIT);
  if (got <= 0) return Verdict::kStranger;
  candidate.received.append(chunk, static_cast<size_t>(got));
  if (candidate.received.size() < kHelloBytes) return Verdict::kUndecided;
  try {
    const auto [type, length] = decode_frame_header(candidate.received.data());
    const std::string_view payload = std::string_view(candidate.received).substr(kFrameHeaderBytes);
    const bool valid = length == kHelloPayloadBytes && is_hello(type, payload, token_);
    return valid ? Verdict::kEngine : Verdict::kStranger;
  } catch (const ProtocolError&) {
    return Verdict::kStranger;
  }
}

EngineLink::EngineLink(int fd) : fd_(fd), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), buffer_(kReceiveBytes) {
  if (wake_fd_ < 0) fail("eventfd", fd_);
  const int bytes = 4 << 20;
  setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

EngineLink::~EngineLink() {
  close(wake_fd_);
  close(fd_);
}

void EngineLink::shut_down() {
  is_gone_ = true;
  shutdown(fd_, SHUT_RDWR);
}

void EngineLink::send(std::string_view frame) {
  std::lock_guard<std::mutex> lock(send_mutex_);
  if (is_gone_) return;
  const size_t num_kept = kept_.size() - kept_begin_;
  if (num_kept == 0) frame.remove_prefix(push(frame));
  if (frame.empty() || is_gone_) return;
  kept_.append(frame);
  const uint64_t one = 1;
  if (num_kept == 0 && write(wake_fd_, &one, sizeof one) < 0) shut_down();  // cannot be: the counter is read each time
}

bool EngineLink::is_behind() {
  std::lock_guard<std::mutex> lock(send_mutex_);
  return !is_gone_ && kept_.size() - kept_begin_ >= kMaxUnreadBytes;
}

// Under the lock.  Returns how many bytes the kernel took; an engine that is gone takes none.
size_t EngineLink::push(std::string_view bytes) {
  size_t num_sent = 0;
  while (num_sent < bytes.size()) {
    const ssize_t sent = ::send(fd_, bytes.data() + num_sent, bytes.size() - num_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      num_sent += static_cast<size_t>(sent);
    } else if (errno != EINTR) {
      if (errno != EAGAIN) shut_down();  // half a frame may be out: nothing more can be said on this connection
      break;
    }
  }
  return num_sent;
}

void EngineLink::flush() {
  std::lock_guard<std::mutex> lock(send_mutex_);
  kept_begin_ += push(std::string_view(kept_).substr(kept_begin_));
  if (kept_begin_ == kept_.size() || is_gone_) {
    std::string().swap(kept_);
  } else if (kept_begin_ > kept_.size() / 2) {  // so a byte is moved once at most, and a backlog need not end for this
    kept_.erase(0, kept_begin_);
  } else {
    return;
  }
  kept_begin_ = 0;
}

bool EngineLink::has_kept() {
  std::lock_guard<std::mutex> lock(send_mutex_);
  return !kept_.empty();
}

bool EngineLink::receive(int timeout_ms, const std::function<void(FrameType, std::string_view)>& on_frame) {
  const short wanted_events = has_kept() ? POLLIN | POLLOUT : POLLIN;
  pollfd waiting[] = {{fd_, wanted_events, 0}, {wake_fd_, POLLIN, 0}};
  if (poll(waiting, 2, timeout_ms) <= 0) return true;
  uint64_t num_wakes;
  if (waiting[1].revents != 0 && read(wake_fd_, &num_wakes, sizeof num_wakes) < 0 && errno != EAGAIN) fail("eventfd");
  if (waiting[0].revents & POLLOUT) flush();
  if ((waiting[0].revents & ~POLLOUT) == 0) return true;
  const ssize_t got = recv(fd_, buffer_.data() + end_, buffer_.size() - end_, MSG_DONTWAIT);
  if (got == 0) return false;
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  end_ += static_cast<size_t>(got);
  size_t wanted = 0;  // bytes of the incomplete frame at the end
  while (end_ - begin_ >= kFrameHeaderBytes) {
    const auto [type, length] = decode_frame_header(buffer_.data() + begin_);
    wanted = kFrameHeaderBytes + length;
    if (end_ - begin_ < wanted) break;
    const std::string_view payload(buffer_.data() + begin_ + kFrameHeaderBytes, length);
    begin_ += wanted;
    wanted = 0;
    on_frame(type, payload);
  }
  std::copy(buffer_.begin() + static_cast<long>(begin_), buffer_.begin() + static_cast<long>(end_), buffer_.begin());
  end_ -= begin_;
  begin_ = 0;
  if (wanted > buffer_.size() || end_ == buffer_.size()) {
    buffer_.resize(std::max(wanted, 2 * buffer_.size()));
  } else if (end_ == 0 && buffer_.size() > kReceiveBytes) {  // a large frame is done, and the next one is seldom large
    std::vector<char>(kReceiveBytes).swap(buffer_);
  }
  return true;
}

}  // namespace slipstream
