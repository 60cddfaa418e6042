// Triton's C API as far as the backend uses it, in memory: for the fuzzers and for the host of stress.cc.
//
// Strict where the server is forgiving: a second final response, a response after it, a factory deleted twice, or a
// request released twice aborts the program.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api.h"

// What a client has been sent; outlives its request.
struct Client {
  std::atomic<bool> is_cancelled{false};
  std::mutex mutex;
  std::condition_variable changed;
  size_t num_responses = 0, num_bytes = 0;
  uint64_t handle = 0;  // the last output of eight bytes
  std::string error;
  bool has_ended = false;

  bool wait_end(int timeout_ms);
  void take(uint32_t flags, TRITONSERVER_Error* error, size_t bytes, uint64_t sent_handle = 0);
  uint64_t wait_handle(int timeout_ms);
};

struct TRITONSERVER_Error {
  TRITONSERVER_Error_Code code;
  std::string message;
};

struct TRITONSERVER_Message {
  std::string json;
};

struct TRITONBACKEND_Input {
  std::string name;
  TRITONSERVER_DataType dtype;
  std::vector<int64_t> shape;
  std::vector<std::string> buffers;
  uint64_t num_bytes = 0;  // as the server says, whatever the buffers hold
  TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
};

struct RequestParameter {
  std::string name;
  TRITONSERVER_ParameterType type;
  std::string text;
  int64_t integer = 0;
  bool truth = false;
  double real = 0;
};

struct TRITONBACKEND_Request {
  std::string id;
  uint64_t timeout_us = 0;
  std::vector<std::string> outputs;
  std::vector<TRITONBACKEND_Input> inputs;
  std::vector<RequestParameter> parameters;
  std::shared_ptr<Client> client = std::make_shared<Client>();
  std::atomic<int> num_releases{0};
  void (*on_release)(TRITONBACKEND_Request*) = nullptr;  // may delete it, as the server does
};

struct TRITONBACKEND_ResponseFactory {
  std::shared_ptr<Client> client;
};

struct TRITONBACKEND_Backend {
  std::string directory;
  void* state = nullptr;
};

struct TRITONBACKEND_Model {
  TRITONBACKEND_Backend* backend;
  std::string name, config;
  void* state = nullptr;
};

struct TRITONBACKEND_ModelInstance {
  TRITONBACKEND_Model* model;
};

extern std::atomic<bool> server_logs;  // to stderr
