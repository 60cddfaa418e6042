#include "engine_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <system_error>

#include "status.h"

namespace slipstream {
namespace {

constexpr size_t kKeptLines = 20;
constexpr size_t kMaxLineBytes = 4096;

void close_all_above_stderr() {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, 3u, ~0u, 0u) == 0) return;
#endif
  const int limit = static_cast<int>(sysconf(_SC_OPEN_MAX));
  for (int fd = 3; fd < limit; ++fd) close(fd);
}

// In the forked child of a process with many threads: only async-signal-safe calls.
[[noreturn]] void run_child(char* const argv[], int null_fd, int output_fd, pid_t server) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != server) _exit(127);  // the server died before prctl
  setsid();  // its own group: a Ctrl-C at the server must reach it as a drain, and a kill must reach its workers
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int number = 1; number < 32; ++number) signal(number, SIG_DFL);
  dup2(null_fd, 0);
  dup2(output_fd, 1);
  dup2(output_fd, 2);
  close_all_above_stderr();
  execv(argv[0], argv);
  static const char kMessage[] = "E cannot execute the engine launcher\n";
  if (write(2, kMessage, sizeof kMessage - 1) < 0) _exit(126);
  _exit(127);
}

// A server inherits "ignore" from a parent that ignored SIGCHLD; the kernel then reaps its children by itself and tells
// nobody how they ended.  tritonserver never asks for that, so the default is put back.
void stop_ignoring_children() {
  struct sigaction action{};
  if (sigaction(SIGCHLD, nullptr, &action) != 0) return;
  const bool is_default = action.sa_handler == SIG_DFL && (action.sa_flags & SA_NOCLDWAIT) == 0;
  const bool is_ignored = action.sa_handler == SIG_IGN && (action.sa_flags & SA_SIGINFO) == 0;
  if (is_default || (!is_ignored && (action.sa_flags & SA_NOCLDWAIT) == 0)) return;
  if (is_ignored) action.sa_handler = SIG_DFL;
  action.sa_flags &= ~SA_NOCLDWAIT;
  if (sigaction(SIGCHLD, &action, nullptr) == 0) {
    log_info("the server was started with SIGCHLD ignored; it is no longer, so that engines can be waited for");
  }
}

}  // namespace

std::string ProcessEnd::for_operator() const {
  return last_lines.empty() ? how : how + "; its last lines:" + last_lines;
}

EngineProcess::EngineProcess(const std::vector<std::string>& argv, std::string log_prefix)
    : log_prefix_(std::move(log_prefix)) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  int output[2];
  const int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null_fd < 0) throw std::system_error(errno, std::generic_category(), "/dev/null");
  if (pipe2(output, O_CLOEXEC) != 0) {
    const int pipe_errno = errno;
    close(null_fd);
    throw std::system_error(pipe_errno, std::generic_category(), "pipe");
  }
  stop_ignoring_children();
  const pid_t server = getpid();
  pid_ = fork();
  if (pid_ == 0) run_child(arguments.data(), null_fd, output[1], server);
  const int fork_errno = errno;
  close(null_fd);
  close(output[1]);
  if (pid_ < 0) {
    close(output[0]);
    throw std::system_error(fork_errno, std::generic_category(), "fork");
  }
  try {
    forwarder_ = named_thread("slip-output", [this, fd = output[0]] { forward_output(fd); });
  } catch (const std::system_error&) {  // no more threads
    close(output[0]);
    kill();
    throw;
  }
}

EngineProcess::~EngineProcess() {
  kill();
  stop_forwarding_ = true;
  forwarder_.join();
}

bool EngineProcess::has_exited() {
  if (exited_) return true;
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0) {
    exited_ = info.si_pid == pid_;  // not reaped yet: its number stays taken until its group has been killed
  } else if (errno == ECHILD) {
    note_reaped_by_kernel();
  }
  return exited_;
}

// Somebody made the server ignore SIGCHLD after the start, or waits for all children: how it ended is lost.
void EngineProcess::note_reaped_by_kernel() {
  ::kill(-pid_, SIGKILL);  // its workers; as long as there is one, the group's number is nobody else's
  is_status_known_ = false;
  exited_ = reaped_ = true;
}

bool EngineProcess::wait_exit(int timeout_ms) {
  for (int waited = 0; !has_exited(); waited += 5) {
    if (waited >= timeout_ms) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void EngineProcess::signal_group(int signal_number) {
  if (reaped_) return;
  if (::kill(-pid_, signal_number) != 0) ::kill(pid_, signal_number);  // no group yet: before its setsid()
}

void EngineProcess::kill() {
  if (reaped_) return;
  signal_group(SIGKILL);
  pid_t waited;
  do waited = waitpid(pid_, &wait_status_, 0);
  while (waited < 0 && errno == EINTR);
  is_status_known_ = waited == pid_;
  exited_ = reaped_ = true;
}

ProcessEnd EngineProcess::describe_end() {
  const bool has_ended_itself = has_exited();
  kill();  // its workers too, else they keep the pipe open
  ProcessEnd end;
  if (!has_ended_itself) {
    end.how = "closed its connection and was killed";
  } else if (!is_status_known_) {
    end.how = "ended in a way that the system did not tell";
  } else if (WIFSIGNALED(wait_status_)) {
    const int number = WTERMSIG(wait_status_);
    end.how = "was killed by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
  } else {
    end.how = "exited with status " + std::to_string(WEXITSTATUS(wait_status_));
  }
  stop_forwarding_ = true;
  while (!forwarded_all_) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  std::lock_guard<std::mutex> lock(lines_mutex_);
  for (const std::string& line : last_lines_) end.last_lines += "\n  " + line;
  return end;
}

// Own thread: cut the pipe into lines until the writers are gone, or until told to stop and nothing is left.
void EngineProcess::forward_output(int pipe_fd) {
  std::string pending;
  char chunk[16384];
  pollfd waiting{pipe_fd, POLLIN, 0};
  while (true) {
    if (poll(&waiting, 1, 50) == 0) {
      if (stop_forwarding_) break;  // a grandchild may still hold the pipe: do not wait for it
      continue;
    }
    const ssize_t got = read(pipe_fd, chunk, sizeof chunk);
    if (got <= 0) break;
    pending.append(chunk, static_cast<size_t>(got));
    for (size_t end; (end = pending.find('\n')) != std::string::npos || pending.size() > kMaxLineBytes;) {
      const size_t length = end == std::string::npos ? kMaxLineBytes : end;
      forward_line(pending.substr(0, length));
      pending.erase(0, end == std::string::npos ? length : length + 1);
    }
  }
  if (!pending.empty()) forward_line(pending);
  close(pipe_fd);
  forwarded_all_ = true;
}

void EngineProcess::forward_line(const std::string& line) {
  {
    std::lock_guard<std::mutex> lock(lines_mutex_);
    last_lines_.push_back(line);
    if (last_lines_.size() > kKeptLines) last_lines_.pop_front();
  }
  TRITONSERVER_LogLevel level = TRITONSERVER_LOG_INFO;
  std::string text = line;
  if (line.size() > 1 && line[1] == ' ') {
    if (line[0] == 'W') level = TRITONSERVER_LOG_WARN;
    if (line[0] == 'E') level = TRITONSERVER_LOG_ERROR;
    if (line[0] == 'D') level = TRITONSERVER_LOG_VERBOSE;
    if (std::string("IWED").find(line[0]) != std::string::npos) text = line.substr(2);
  }
  if (level == TRITONSERVER_LOG_VERBOSE && !TRITONSERVER_LogIsEnabled(level)) return;
  log(level, log_prefix_ + text);
}

}  // namespace slipstream
