// The router by itself; prints one line for each case, which test_router.py reads.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

#include "router.h"

using namespace slipstream;

static long num_allocations_left = -1;  // -1: any number

__attribute__((noinline)) void* operator new(size_t size) {
  if (num_allocations_left == 0) throw std::bad_alloc();
  if (num_allocations_left > 0) --num_allocations_left;
  return std::malloc(size);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

std::string prompt_of(char letter, size_t num_blocks) { return std::string(num_blocks * kBlockBytes, letter); }

void print(const char* name, const std::vector<size_t>& order) {
  printf("%s:", name);
  for (const size_t replica : order) printf(" %zu", replica);
  printf("\n");
}

std::vector<ReplicaLoad> loads(std::vector<size_t> nums, size_t down = 99) {
  std::vector<ReplicaLoad> made;
  for (size_t i = 0; i < nums.size(); ++i) made.push_back({i != down, nums[i]});
  return made;
}

void rank_cases() {
  Router router(3, 2);
  const PromptBlocks none, known = hash_blocks(prompt_of('a', 4), ""), longer = hash_blocks(prompt_of('a', 6), "");
  print("all equal", router.rank(none, loads({0, 0, 0})));
  router.was_sent(0, none, 100);
  print("longest ago", router.rank(none, loads({0, 0, 0})));
  print("fewest", router.rank(none, loads({2, 1, 0})));
  router.was_sent(2, known, 100);
  print("known", router.rank(longer, loads({0, 0, 2})));
  print("loaded", router.rank(longer, loads({0, 0, 3})));
  router.was_sent(1, longer, 100);
  print("longest", router.rank(longer, loads({0, 2, 2})));
  print("down", router.rank(longer, loads({0, 0, 0}, 1)));
  print("least of those that serve", router.rank(longer, loads({7, 0, 8}, 1)));
  print("shared", router.rank(hash_blocks(prompt_of('a', 3) + prompt_of('b', 3), ""), loads({0, 1, 1})));
  const std::string document = prompt_of('d', 40);
  router.was_sent(0, hash_blocks(document + prompt_of('x', 1), ""), 100);
  print("much shared", router.rank(hash_blocks(document + prompt_of('y', 1), ""), loads({2, 0, 0})));
  router.was_sent(1, hash_blocks(document + prompt_of('z', 1), ""), 100);
  print("shared by all", router.rank(hash_blocks(document + prompt_of('y', 1), ""), loads({2, 0, 0})));
  print("the same again", router.rank(hash_blocks(document + prompt_of('x', 1), ""), loads({2, 0, 0})));
  router.forget(1);
  print("forgotten", router.rank(longer, loads({0, 0, 0})));
  print("salted", router.rank(hash_blocks(prompt_of('a', 6), "salt"), loads({1, 1, 2})));
}

void known_cases() {
  KnownBlocks known;
  const PromptBlocks first = hash_blocks(prompt_of('a', 8), ""), second = hash_blocks(prompt_of('b', 8), "");
  known.add(first, 12);
  known.add(second, 12);
  printf("evicted: %zu %zu of %zu\n", known.find(first).num_blocks, known.find(second).num_blocks, known.size());
  known.add(hash_blocks(prompt_of('c', 20), ""), 12);
  printf("too long: %zu\n", known.size());
  printf("parts: %zu %zu\n", hash_blocks(std::string(kBlockBytes * 2 - 1, 'a'), "").size(), hash_blocks("", "").size());
  printf("most: %zu\n", hash_blocks(std::string(kMostRoutedBytes + 9 * kBlockBytes, 'a'), "").size());
  for (int i = 0; i < 40; ++i) known.add(hash_blocks(std::to_string(i) + prompt_of('d', 4096), ""), SIZE_MAX);
  printf("bounded: %d\n", known.size() == kMostKnownBlocks);
}

// Whatever allocation fails, the replica knows all of its prompts or none, and goes on.
void memory_cases() {
  const PromptBlocks first = hash_blocks(prompt_of('a', 8), ""), second = hash_blocks(prompt_of('b', 8), "");
  int num_forgotten = 0;
  for (int num_allocations = 0; num_allocations < 40; ++num_allocations) {
    Router router(2, 2);
    router.was_sent(0, first, 100);
    num_allocations_left = num_allocations;
    router.was_sent(0, second, 100);
    num_allocations_left = -1;
    const bool knows_first = router.rank(first, loads({2, 0}))[0] == 0;
    const bool knows_second = router.rank(second, loads({2, 0}))[0] == 0;
    if (knows_first != knows_second) printf("after %d: ", num_allocations);
    num_forgotten += !knows_first;
    router.was_sent(0, second, 100);
    router.was_sent(0, first, 12);
    if (router.rank(first, loads({2, 0}))[0] != 0) printf("broken after %d: ", num_allocations);
  }
  printf("without memory: %d\n", num_forgotten > 8 && num_forgotten < 40);
}

}  // namespace

int main() {
  memory_cases();
  rank_cases();
  known_cases();
}
