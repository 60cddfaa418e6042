// A server that has no threads left when a model is loaded: the load fails with the reason, nothing is left of it, and
// the model can be loaded when there are threads again. A host of the backend's library, as tests/fuzz/stress.cc is.
//
//   few_threads LIBRARY BACKEND_DIR
// Prints the error of each load that has one thread more than the one before, then "loaded".
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>

#include "fake_api.h"

static std::atomic<int> num_threads_left{1 << 20};

extern "C" int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) noexcept {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return num_threads_left-- > 0 ? create(thread, attributes, body, argument) : EAGAIN;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  const auto initialize =
      reinterpret_cast<decltype(&TRITONBACKEND_Initialize)>(dlsym(library, "TRITONBACKEND_Initialize"));
  const auto load =
      reinterpret_cast<decltype(&TRITONBACKEND_ModelInitialize)>(dlsym(library, "TRITONBACKEND_ModelInitialize"));
  const auto unload =
      reinterpret_cast<decltype(&TRITONBACKEND_ModelFinalize)>(dlsym(library, "TRITONBACKEND_ModelFinalize"));
  TRITONBACKEND_Backend backend{argv[2]};
  if (initialize(&backend) != nullptr) return 4;
  const std::string parameters = "\"parameters\":{\"step_ms\":{\"string_value\":\"1\"}}";
  const std::string groups = "\"instance_group\":[{\"count\":2}]";
  for (int num_threads = 0; num_threads < 20; ++num_threads) {
    TRITONBACKEND_Model model{&backend, "llm", "{\"name\":\"llm\"," + groups + "," + parameters + "}"};
    num_threads_left = num_threads;
    TRITONSERVER_Error* error = load(&model);
    num_threads_left = 1 << 20;
    if (error == nullptr) {
      std::printf("loaded\n");
      return unload(&model) == nullptr && waitpid(-1, nullptr, WNOHANG) == -1 ? 0 : 5;
    }
    std::printf("%d: %s\n", static_cast<int>(error->code), error->message.c_str());
    delete error;
    if (waitpid(-1, nullptr, WNOHANG) != -1) std::printf("a process is left\n");
  }
  return 6;
}
