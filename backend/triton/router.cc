#include "router.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <tuple>

namespace slipstream {
namespace {

// Drawn once per process: else a client could choose prompts whose hashes collide, and steer requests to one replica.
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

KnownPart KnownBlocks::find(const PromptBlocks& prompt) const {
  KnownPart known;
  for (const uint64_t hash : prompt) {
    const auto block = blocks_.find(hash);
    if (block == blocks_.end()) break;
    ++known.num_blocks;
    known.is_continued = !block->second.has_next || known.num_blocks == prompt.size();
  }
  return known;
}

// From the last block to the first: a block that others follow outlives them.
void KnownBlocks::add(const PromptBlocks& prompt, size_t capacity) {
  for (auto hash = prompt.rbegin(); hash != prompt.rend(); ++hash) {
    const auto [found, is_new] = blocks_.try_emplace(*hash);
    Block& block = found->second;
    if (is_new) {
      by_age_.push_front(*hash);
      block.place = by_age_.begin();
    } else {
      by_age_.splice(by_age_.begin(), by_age_, block.place);
    }
    block.has_next = block.has_next || hash != prompt.rbegin();
  }
  while (by_age_.size() > std::min(capacity, kMostKnownBlocks)) {
    blocks_.erase(by_age_.back());
    by_age_.pop_back();
  }
}

void KnownBlocks::clear() {
  by_age_.clear();
  blocks_.clear();
}

std::vector<KnownPart> Router::find(const PromptBlocks& prompt) const {
  std::vector<KnownPart> known;
  for (const Replica& replica : replicas_) known.push_back(replica.known.find(prompt));
  return known;
}

std::vector<size_t> Router::rank(const PromptBlocks& prompt, const std::vector<ReplicaLoad>& loads) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<KnownPart> known = find(prompt);
  size_t least = std::numeric_limits<size_t>::max(), known_to_least = 0;
  for (size_t i = 0; i < loads.size(); ++i) {
    if (!loads[i].can_serve || loads[i].num_requests > least) continue;
    known_to_least = loads[i].num_requests < least ? known[i].num_blocks : std::max(known_to_least, known[i].num_blocks);
    least = loads[i].num_requests;
  }
  std::vector<std::tuple<bool, bool, size_t, size_t, uint64_t, size_t>> keys;  // the least is the best
  for (size_t i = 0; i < loads.size(); ++i) {
    const size_t num_known = known[i].num_blocks, num_requests = loads[i].num_requests;
    const size_t num_alone = num_known - std::min(num_known, known_to_least);
    const size_t most = known[i].is_continued ? load_slack_ : std::min(load_slack_, num_alone / kSharedBlocksPerRequest);
    const bool is_loaded = num_requests > least && num_requests - least > most;
    const size_t num_unknown = is_loaded ? 0 : prompt.size() - num_known;
    keys.emplace_back(!loads[i].can_serve, is_loaded, num_unknown, num_requests, replicas_[i].last_sent, i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<size_t> order;
  for (const auto& key : keys) order.push_back(std::get<5>(key));
  return order;
}

void Router::was_sent(size_t replica, const PromptBlocks& prompt, size_t capacity) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  replicas_[replica].last_sent = ++num_sent_;
  try {
    replicas_[replica].known.add(prompt, capacity);
  } catch (const std::bad_alloc&) {  // in the middle of a block, perhaps
    replicas_[replica].known.clear();
  }
}

void Router::forget(size_t replica) {
  std::lock_guard<std::mutex> lock(mutex_);
  replicas_[replica].known.clear();
}

}  // namespace slipstream
