// The unix socket between this backend and one engine process.
//
// EngineListener waits for the one connection that knows the token; EngineLink sends whole frames (any thread) and
// cuts what arrives into frames (one thread).
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
  // -1 once
  // keep_waiting() is false, which is asked at least every 50 ms.
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
  explicit EngineLink(int fd);
  ~EngineLink();
  EngineLink(const EngineLink&) = delete;

  // False when the engine is gone or has not read for 30 s; the reader then sees the end of the stream.
  bool send(std::string_view frame);

  // Wait up to timeout_ms for bytes and hand every complete frame to on_frame (its payload is valid during the call).
  // False at the end of the stream.  Throws ProtocolError; so may on_frame.
  bool receive(int timeout_ms, const std::function<void(FrameType, std::string_view)>& on_frame);

  void shut_down();

 private:
  const int fd_;
  std::mutex send_mutex_;
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;  // the unread bytes of buffer_
};

}  // namespace slipstream
