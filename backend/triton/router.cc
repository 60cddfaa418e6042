#include "router.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

namespace slipstream {
namespace {

// Of this process: else a client could choose prompts whose hashes meet, and have others' requests sent to one replica.
uint64_t secret() {
  static const uint64_t drawn = [] {
    uint64_t value = 0x9e3779b97f4a7c15u;
    if (getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) value ^= reinterpret_cast<uintptr_t>(&value);
    return value;
  }();
  return drawn;
}

// One word more: the mixing step of splitmix64.
uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) + 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

uint64_t hash_bytes(uint64_t hash, std::string_view bytes) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof word, bytes.size() - at));
    hash = mix(hash, word);
  }
  return mix(hash, bytes.size());
}

}  // namespace

PromptBlocks hash_blocks(std::string_view prompt, std::string_view seed) {
  PromptBlocks blocks;
  const size_t num_blocks = std::min(prompt.size(), kMostRoutedBytes) / kBlockBytes;
  blocks.reserve(num_blocks);
  uint64_t hash = hash_bytes(secret(), seed);
  for (size_t block = 0; block < num_blocks; ++block) {
    hash = hash_bytes(hash, prompt.substr(block * kBlockBytes, kBlockBytes));
    blocks.push_back(hash);
  }
  return blocks;
}

size_t KnownBlocks::count_known(const PromptBlocks& prompt) const {
  const auto unknown = std::find_if(prompt.begin(), prompt.end(), [this](uint64_t block) { return !places_.count(block); });
  return static_cast<size_t>(unknown - prompt.begin());
}

// From the last block to the first: a block that others follow outlives them.
void KnownBlocks::add(const PromptBlocks& prompt, size_t capacity) {
  for (auto block = prompt.rbegin(); block != prompt.rend(); ++block) {
    const auto [found, is_new] = places_.try_emplace(*block);
    if (is_new) {
      by_age_.push_front(*block);
      found->second = by_age_.begin();
    } else {
      by_age_.splice(by_age_.begin(), by_age_, found->second);
    }
  }
  while (by_age_.size() > std::min(capacity, kMostKnownBlocks)) {
    places_.erase(by_age_.back());
    by_age_.pop_back();
  }
}

void KnownBlocks::clear() {
  by_age_.clear();
  places_.clear();
}

std::vector<size_t> Router::rank(const PromptBlocks& prompt, const std::vector<ReplicaLoad>& loads) {
  size_t least = std::numeric_limits<size_t>::max() - load_slack_;
  for (const ReplicaLoad& load : loads) {
    if (load.can_serve) least = std::min(least, load.num_requests);
  }
  std::vector<size_t> order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::tuple<bool, bool, size_t, size_t, uint64_t, size_t>> keys;  // the least is the best
  for (const size_t i : order) {
    const ReplicaLoad& load = loads[i];
    const bool is_loaded = load.num_requests > least + load_slack_;
    const size_t num_unknown = is_loaded ? 0 : prompt.size() - replicas_[i].known.count_known(prompt);
    keys.emplace_back(!load.can_serve, is_loaded, num_unknown, load.num_requests, replicas_[i].last_sent, i);
  }
  std::sort(order.begin(), order.end(), [&keys](size_t a, size_t b) { return keys[a] < keys[b]; });
  return order;
}

void Router::was_sent(size_t replica, const PromptBlocks& prompt, size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  replicas_[replica].known.add(prompt, capacity);
  replicas_[replica].last_sent = ++num_sent_;
}

void Router::forget(size_t replica) {
  std::lock_guard<std::mutex> lock(mutex_);
  replicas_[replica].known.clear();
}

}  // namespace slipstream
