// A host of the backend's library, as the server is, with the stand-in engine behind it: threads of clients that ask,
// read, cancel, forge handles and crash the engines, of a model with one and of a model with three.  For ThreadSanitizer, which a real server cannot be run under.
//
//   stress LIBRARY BACKEND_DIR SECONDS
// Exits with 1 when a request has no end or is not released, a forged handle ends a request, or a rightful one does not.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "fake_api.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kEndMs = 20000;
std::atomic<size_t> num_requests{0}, num_errors{0}, num_cancelled{0}, num_open{0};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "stress: %s\n", what);
  std::_Exit(1);
}

template <typename Function>
Function symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) fail(name);
  return reinterpret_cast<Function>(found);
}

void check(TRITONSERVER_Error* error) {
  if (error != nullptr) fail(TRITONSERVER_ErrorMessage(error));
}

// The functions that the library offers, by type.
struct Library {
  void* handle;
  decltype(&TRITONBACKEND_Initialize) initialize;
  decltype(&TRITONBACKEND_Finalize) finalize;
  decltype(&TRITONBACKEND_ModelInitialize) load;
  decltype(&TRITONBACKEND_ModelFinalize) unload;
  decltype(&TRITONBACKEND_ModelInstanceExecute) execute;

  explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) fail(dlerror());
    initialize = symbol<decltype(initialize)>(handle, "TRITONBACKEND_Initialize");
    finalize = symbol<decltype(finalize)>(handle, "TRITONBACKEND_Finalize");
    load = symbol<decltype(load)>(handle, "TRITONBACKEND_ModelInitialize");
    unload = symbol<decltype(unload)>(handle, "TRITONBACKEND_ModelFinalize");
    execute = symbol<decltype(execute)>(handle, "TRITONBACKEND_ModelInstanceExecute");
  }
};

std::string config_of(const char* name, const char* task, const char* step_ms, const char* num_engines = "1") {
  const std::string parameters = std::string("{\"task\":{\"string_value\":\"") + task +
                                 "\"},\"step_ms\":{\"string_value\":\"" + step_ms + "\"}}";
  return std::string("{\"name\":\"") + name + "\",\"instance_group\":[{\"count\":" + num_engines +
         "}],\"parameters\":" + parameters + "}";
}

TRITONBACKEND_Input bytes_input(const std::string& text) {
  const uint32_t size = static_cast<uint32_t>(text.size());
  std::string data(reinterpret_cast<const char*>(&size), sizeof size);
  data += text;
  return {"text_input", TRITONSERVER_TYPE_BYTES, {1}, {data}, data.size(), TRITONSERVER_MEMORY_CPU};
}

TRITONBACKEND_Input handle_input(uint64_t handle) {
  const std::string data(reinterpret_cast<const char*>(&handle), sizeof handle);
  return {"REQUEST_HANDLE", TRITONSERVER_TYPE_UINT64, {1}, {data}, data.size(), TRITONSERVER_MEMORY_CPU};
}

class Host {
 public:
  Host(Library& library, const char* directory) : library_(library), backend_{directory} {
    check(library.initialize(&backend_));
    for (TRITONBACKEND_Model* model : {&llm_, &replicated_, &detok_}) check(library.load(model));
  }
  ~Host() {
    for (TRITONBACKEND_Model* model : {&llm_, &replicated_, &detok_}) check(library_.unload(model));
    check(library_.finalize(&backend_));
    if (num_open != 0) fail("a request was not released");
  }

  std::shared_ptr<Client> ask(TRITONBACKEND_ModelInstance& instance, std::unique_ptr<TRITONBACKEND_Request> request) {
    const std::shared_ptr<Client> client = request->client;
    request->on_release = [](TRITONBACKEND_Request* released) {
      delete released;
      --num_open;
    };
    ++num_open;
    ++num_requests;
    TRITONBACKEND_Request* one = request.release();
    check(library_.execute(&instance, &one, 1));
    return client;
  }
  std::shared_ptr<Client> generate(const std::string& script, bool has_replicas = false) {
    auto request = std::make_unique<TRITONBACKEND_Request>();
    request->inputs.push_back(bytes_input(script));
    request->outputs = {"text_output", "request_handle"};
    return ask(has_replicas ? replicated_instance_ : llm_instance_, std::move(request));
  }
  // For all replicas, with one answer.
  std::shared_ptr<Client> command() {
    auto request = std::make_unique<TRITONBACKEND_Request>();
    request->parameters.push_back({"control", TRITONSERVER_PARAMETER_STRING, "sleep"});
    request->outputs = {"text_output"};
    return ask(replicated_instance_, std::move(request));
  }
  // A cancelled request to the model at the end of an ensemble, as the server makes it.
  void cancel_by_handle(uint64_t handle) {
    auto request = std::make_unique<TRITONBACKEND_Request>();
    request->inputs = {bytes_input("x"), handle_input(handle)};
    request->outputs = {"text_output"};
    request->client->is_cancelled = true;
    end(ask(detok_instance_, std::move(request)));
  }
  static void end(const std::shared_ptr<Client>& client) {
    if (!client->wait_end(kEndMs)) fail("a request has no end");
    std::lock_guard<std::mutex> lock(client->mutex);
    if (!client->error.empty()) ++num_errors;
  }

 private:
  Library& library_;
  TRITONBACKEND_Backend backend_;
  TRITONBACKEND_Model llm_{&backend_, "llm", config_of("llm", "generate", "1")};
  TRITONBACKEND_Model replicated_{&backend_, "replicated", config_of("replicated", "generate", "1", "3")};
  TRITONBACKEND_Model detok_{&backend_, "detok", config_of("detok", "detokenize", "0")};
  TRITONBACKEND_ModelInstance llm_instance_{&llm_}, replicated_instance_{&replicated_}, detok_instance_{&detok_};
};

void use_handles(Host& host) {
  const auto victim = host.generate("{\"tokens\": 400}");
  const uint64_t handle = victim->wait_handle(kEndMs);
  for (uint64_t guess = 0; guess < 300; ++guess) host.cancel_by_handle(guess);
  for (uint64_t near = 1; near < 50; ++near) host.cancel_by_handle(handle + near);
  Host::end(victim);
  if (victim->num_responses != 400 || !victim->error.empty()) fail("a forged handle ended a request");
  const auto own = host.generate("{\"tokens\": 100000}");
  host.cancel_by_handle(own->wait_handle(kEndMs));
  Host::end(own);
}

void run_client(Host& host, int seed, Clock::time_point until) {
  std::mt19937 dice(static_cast<unsigned>(seed));
  while (Clock::now() < until) {
    const bool has_replicas = seed % 2 != 0;
    if (has_replicas && dice() % 8 == 0) {
      const auto commanded = host.command();
      commanded->is_cancelled = dice() % 2 == 0;
      Host::end(commanded);
      continue;
    }
    const std::string prompt(100 * (dice() % 40), 'p');
    const std::string tokens = std::to_string(1 + dice() % 30);
    const auto client = host.generate("{\"p\": \"" + prompt + "\", \"tokens\": " + tokens + "}", has_replicas);
    const unsigned kind = dice() % 4;
    if (kind == 0) std::this_thread::sleep_for(std::chrono::milliseconds(dice() % 10));
    if (kind == 1) host.cancel_by_handle(client->wait_handle(kEndMs));
    if (kind <= 1) {
      client->is_cancelled = true;
      ++num_cancelled;
    }
    Host::end(client);
  }
}

void crash_engines(Host& host, Clock::time_point until) {
  while (Clock::now() + std::chrono::seconds(2) < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(900));
    for (const bool has_replicas : {false, true}) {
      Host::end(host.generate("{\"tokens\": 2, \"then\": \"crash\"}", has_replicas));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  Library library(argv[1]);
  {
    Host host(library, argv[2]);
    use_handles(host);
    const auto until = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * std::atof(argv[3])));
    std::vector<std::thread> threads;
    for (int seed = 0; seed < 6; ++seed) threads.emplace_back([&host, seed, until] { run_client(host, seed, until); });
    threads.emplace_back([&host, until] { crash_engines(host, until); });
    for (std::thread& thread : threads) thread.join();
  }
  std::printf(
      "requests %zu errors %zu cancelled %zu\n", num_requests.load(), num_errors.load(), num_cancelled.load());
  return 0;
}
