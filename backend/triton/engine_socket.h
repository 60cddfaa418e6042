// The unix socket between this backend and one engine process.
//
// EngineListener waits for the one connection that knows the token; EngineLink takes whole frames to send (any thread) and
// cuts what arrives into frames (one thread, which also sends what had to be kept).
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "wire.h"

namespace slipstream {

class EngineListener {
 public:
  EngineListener();   // listens on an abstract name; throws std::system_error
  ~EngineListener();  // the name is gone; an accepted connection lives on
  EngineListener(const EngineListener&) = delete;

  // "@slipstream-..." for an abstract address: it is in no folder, so a server that is killed leaves nothing behind.
  const std::string& path() const { return path_; }
  std::string token_hex() const;

  // The socket of the engine: the first connection of our own user whose HELLO carries the token; any other is closed.
  // -1 once keep_waiting() is false, which is asked at least every 50 ms.  Throws std::system_error when the process has
  // no descriptor left for a connection.
  int accept_engine(const std::function<bool()>& keep_waiting);

 private:
  struct Candidate {
    int fd;
    std::string received;
  };
  enum class Verdict { kUndecided, kEngine, kStranger };
  Verdict examine(Candidate& candidate);
  void add_candidate();

  std::string path_, token_;
  int fd_ = -1;
  std::vector<Candidate> candidates_;
};

class EngineLink {
 public:
  explicit EngineLink(int fd);  // takes it over, also when it throws std::system_error
  ~EngineLink();
  EngineLink(const EngineLink&) = delete;

  // Never waits: what the engine does not read at once is kept, and sent by receive().  An engine that does not read may
  // be busy, stopped or hung; that it is dead is for its process to say.  When it is gone nothing is sent, and the reader
  // sees the end of the stream.
  void send(std::string_view frame);
  // Whether kMaxUnreadBytes or more are kept: it is to get no further request then.
  bool is_behind();

  // Wait up to timeout_ms for bytes and hand every complete frame to on_frame (its payload is valid during the call).
  // False at the end of the stream.  Throws ProtocolError; so may on_frame.
  bool receive(int timeout_ms, const std::function<void(FrameType, std::string_view)>& on_frame);

  static constexpr size_t kMaxUnreadBytes = 64 << 20;

 private:
  size_t push(std::string_view bytes);
  void flush();
  bool has_kept();
  void shut_down();

  const int fd_, wake_fd_;
  std::mutex send_mutex_;
  std::string kept_;       // whole frames, but for the first, of which kept_begin_ bytes and maybe more are out
  size_t kept_begin_ = 0;
  bool is_gone_ = false;
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;  // the unread bytes of buffer_
};

}  // namespace slipstream
