/* LD_PRELOAD: the wall clock of a process, moved by the nanoseconds in the first 8 bytes of $CHAOS_CLOCK_FILE.

   CLOCK_REALTIME is in no time namespace, and setting the machine's clock takes root and hits everybody on it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t* offset_ns;

__attribute__((constructor)) static void map_offset(void) {
  const char* path = getenv("CHAOS_CLOCK_FILE");
  const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
  if (page != MAP_FAILED) offset_ns = page;
  close(fd);
}

/* In tritonserver itself only the backend's reads are moved: its gRPC hands the kernel deadlines that it made of the wall
   clock (abseil's), and the kernel's own clock does not move with this one. */
static int is_moved_for(const void* caller) {
  Dl_info object;
  if (strcmp(program_invocation_short_name, "tritonserver") != 0) return 1;
  return dladdr(caller, &object) != 0 && strstr(object.dli_fname, "libtriton_slipstream") != NULL;
}

static int read_clock(clockid_t clock, struct timespec* at, const void* caller) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int status = real(clock, at);
  const int is_wall_clock = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (status == 0 && is_wall_clock && offset_ns && *offset_ns != 0 && is_moved_for(caller)) {
    const int64_t ns = at->tv_sec * INT64_C(1000000000) + at->tv_nsec + *offset_ns;
    at->tv_sec = ns / 1000000000;
    at->tv_nsec = ns % 1000000000;
  }
  return status;
}

int clock_gettime(clockid_t clock, struct timespec* at) {
  return read_clock(clock, at, __builtin_return_address(0));
}

int gettimeofday(struct timeval* restrict at, void* restrict zone) {
  (void)zone;
  struct timespec now;
  const int status = read_clock(CLOCK_REALTIME, &now, __builtin_return_address(0));
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return status;
}

time_t time(time_t* at) {
  struct timespec now;
  read_clock(CLOCK_REALTIME, &now, __builtin_return_address(0));
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
