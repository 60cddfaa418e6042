// What the server's end of an engine's socket keeps after a frame of 64 MiB.  Prints by how many bytes the process has
// grown.
#include <malloc.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

#include "engine_socket.h"

namespace {

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = write(fd, bytes.data(), bytes.size());
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

// Two small frames with a large one between them; false if they do not arrive as they are.
bool exchange(slipstream::EngineLink& link, int engine) {
  const std::string texts[] = {"first", std::string(64 << 20, 'x'), "last"};
  std::thread sender([&] {
    slipstream::FrameWriter writer;
    for (const std::string& text : texts) {
      writer.begin(slipstream::FrameType::kResponses);
      writer.raw(text.data(), text.size());
      write_all(engine, writer.finish());
    }
  });
  size_t num_received = 0;
  bool is_right = true;
  while (num_received < 3 && is_right) {
    is_right = link.receive(10000, [&](slipstream::FrameType, std::string_view payload) {
      is_right = is_right && payload == texts[num_received++];
    }) && is_right;
  }
  sender.join();
  return is_right;
}

}  // namespace

int main() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  slipstream::EngineLink link(ends[0]);
  const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
  for (int i = 0; i < 3; ++i) {
    if (!exchange(link, ends[1])) return 2;
  }
  printf("%zd\n", static_cast<ssize_t>(mallinfo2().uordblks + mallinfo2().hblkhd - before));
  return 0;
}
