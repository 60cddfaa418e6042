// An engine that reads as fast as requests come, and never catches up: what the link keeps must stay what is unread.
// Prints how many bytes the process has grown by, and the bytes that went through.
#include <malloc.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "engine_socket.h"

int main() {
  constexpr size_t kFrameBytes = 1 << 20, kNumUnread = 16, kNumFrames = 300;
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  slipstream::EngineLink link(ends[0]);
  std::vector<char> taken(kFrameBytes);
  std::string frame(kFrameBytes, '\0');
  const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
  size_t num_read = 0;
  for (size_t i = 0; i < kNumFrames; ++i) {
    for (char& byte : frame) byte = static_cast<char>(i);
    if (link.is_behind()) return 2;
    link.send(frame);
    for (size_t left = i < kNumUnread ? 0 : kFrameBytes; left > 0;) {
      const ssize_t got = read(ends[1], taken.data(), left);
      if (got <= 0) return 3;
      for (ssize_t j = 0; j < got; ++j, ++num_read) {
        if (taken[static_cast<size_t>(j)] != static_cast<char>(num_read / kFrameBytes)) return 4;
      }
      left -= static_cast<size_t>(got);
      link.receive(0, [](slipstream::FrameType, std::string_view) {});
    }
  }
  printf("%zu %zu\n", mallinfo2().uordblks + mallinfo2().hblkhd - before, num_read);
  return 0;
}
