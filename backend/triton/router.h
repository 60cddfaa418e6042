// Which replica of a model takes a request: of the least loaded the one that has most of the prompt in its prefix cache.
//
// Nobody asks an engine for that.  The router remembers the prompts that it sent to each, as a chain of hashes of their
// first MiB in blocks of kBlockBytes, and forgets the least recently used beyond what the engine's KV cache holds.  It
// knows nothing of tokens, and hashes of a process cannot be computed outside of it.  Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace slipstream {

using PromptBlocks = std::vector<uint64_t>;

constexpr size_t kBlockBytes = 256;             // 64 token ids, or about as many tokens of text
constexpr size_t kSharedBlocksPerRequest = 16;  // that a replica alone knows, for it to have a request more
constexpr size_t kMostRoutedBytes = 1u << 20;   // of a prompt; what follows does not count
constexpr size_t kMostKnownBlocks = 1u << 17;   // of an engine: 8 million tokens, about 12 MiB

// The hash of each whole block and all before it.  Prompts with different seeds share none.
PromptBlocks hash_blocks(std::string_view prompt, std::string_view seed);

// How many blocks at the beginning of a prompt are known, and whether the prompt goes on where another one ended: the
// next turn of a conversation, and not one more conversation with the same system prompt.
struct KnownPart {
  size_t num_blocks = 0;
  bool is_continued = false;
};

// The blocks that an engine was sent, the least recently used first to go.
class KnownBlocks {
 public:
  KnownPart find(const PromptBlocks& prompt) const;
  void add(const PromptBlocks& prompt, size_t capacity);
  void clear();
  size_t size() const { return by_age_.size(); }

 private:
  struct Block {
    std::list<uint64_t>::iterator place;
    bool has_next = false;  // another block followed it
  };
  std::list<uint64_t> by_age_;  // the most recently used first
  std::unordered_map<uint64_t, Block> blocks_;
};

// What decides about a replica, at one moment.
struct ReplicaLoad {
  bool can_serve = true;    // up and awake
  size_t num_requests = 0;  // that it has and that have not ended
};

class Router {
 public:
  // load_slack: how many more requests than the least loaded a replica may have and still count as equally loaded, for
  // the next turn of a conversation that it knows.  For a beginning that several prompts share it is one request per
  // kSharedBlocksPerRequest blocks that the least loaded do not know, and at most load_slack.
  Router(size_t num_replicas, size_t load_slack) : load_slack_(load_slack), replicas_(num_replicas) {}

  // All replicas, the best first: those that can serve before others; of these the equally loaded before others; then by
  // known blocks, then by requests, then the one that was chosen longest ago.
  std::vector<size_t> rank(const PromptBlocks& prompt, const std::vector<ReplicaLoad>& loads);

  // A replica has taken it, after which nothing may fail: one that there is no memory for is known to have nothing.
  void was_sent(size_t replica, const PromptBlocks& prompt, size_t capacity) noexcept;
  // Its cache is empty: it was started again, slept, or has other weights.
  void forget(size_t replica);

 private:
  struct Replica {
    KnownBlocks known;
    uint64_t last_sent = 0;  // the number of that request
  };
  // What each replica knows of this prompt.
  std::vector<KnownPart> find(const PromptBlocks& prompt) const;

  const size_t load_slack_;
  std::mutex mutex_;
  std::vector<Replica> replicas_;
  uint64_t num_sent_ = 0;
};

}  // namespace slipstream
