// A request that every replica of a model carries out, such as `sleep`: one answer goes out, when the last has answered.
//
// Each replica has it as a live request of its own.  Whichever thread settles the last one answers and closes it; an
// error of any replica is the answer, else the words of the last one.  Any thread.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>

#include "status.h"

namespace slipstream {

class Broadcast {
 public:
  explicit Broadcast(size_t num_replicas) : num_left_(num_replicas) {}

  // A replica has answered, or never will.  True for the last one.
  bool settle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return --num_left_ == 0;
  }
  bool settle(TRITONSERVER_Error_Code code, const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_.emplace(code, message);
    return --num_left_ == 0;
  }

  bool is_over() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_left_ == 0;
  }

  // The first error.  To be read by the last one.
  const std::optional<BackendError>& error() const { return error_; }

 private:
  std::mutex mutex_;
  size_t num_left_;
  std::optional<BackendError> error_;
};

}  // namespace slipstream
