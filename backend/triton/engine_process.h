// The engine as an operating-system process: start it, forward what it prints to Triton's log, see it end.
//
// Must be created on the thread that will watch it: Linux sends the child its parent-death signal when the *thread*
// that forked it ends, not only when the server does.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace slipstream {

// How a process ended, in the words for an error message.
struct ProcessEnd {
  std::string how;         // "was killed by signal 9 (Killed)" or "exited with status 1": all that clients may read
  std::string last_lines;  // the end of its output, one line each, for those who run the server

  std::string for_operator() const;
};

class EngineProcess {
 public:
  // Runs argv[0] with argv.  log_prefix begins each forwarded line.  Throws std::system_error when it cannot fork.
  EngineProcess(const std::vector<std::string>& argv, std::string log_prefix);
  ~EngineProcess();  // kills what still runs of the process group
  EngineProcess(const EngineProcess&) = delete;

  // Never blocks; true from the first call after the process ended.
  bool has_exited();
  bool wait_exit(int timeout_ms);
  void terminate() { signal_group(15); }
  void kill();

  // Kills what is left of it first.
  ProcessEnd describe_end();

 private:
  void note_reaped_by_kernel();
  void signal_group(int signal_number);
  void forward_output(int pipe_fd);
  void forward_line(const std::string& line);

  const std::string log_prefix_;
  pid_t pid_ = -1;
  bool exited_ = false;
  bool reaped_ = false;  // from then on its number may be another process's
  bool is_status_known_ = true;
  int wait_status_ = 0;
  std::mutex lines_mutex_;
  std::deque<std::string> last_lines_;
  std::atomic<bool> stop_forwarding_{false};
  std::atomic<bool> forwarded_all_{false};
  std::thread forwarder_;
};

}  // namespace slipstream
