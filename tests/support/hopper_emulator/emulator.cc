// Fibers, their scheduler, and copies that arrive late. See emulator.h.

#include "emulator.h"

#include <cstdio>
#include <random>

namespace emulator {

Fiber* current = nullptr;
int num_ctas = 0;
int cluster_size = 1;
unsigned long progress = 0;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kMostIdleRounds = 20000;
void* scheduler_stack = nullptr;
const std::function<void(char*)>* entry = nullptr;

// Saves the callee's registers on this stack, leaves its pointer at *from and goes on with the stack `to`.
extern "C" void switch_stacks(void** from, void* to);
asm(R"(
.globl switch_stacks
switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void start() {
  (*entry)(current->cta->shared.data());
  current->is_done = true;
  ++progress;
  yield();
  std::abort();
}

void prepare(Fiber& fiber) {
  fiber.stack.reset(new char[kStackBytes]);
  auto** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack.get()) + kStackBytes) & ~uintptr_t{15});
  *--top = nullptr;   // start() finds its stack as after a call
  *--top = reinterpret_cast<void*>(&start);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void arrive_at(Cta& cta, const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  auto& barrier = *reinterpret_cast<MemoryBarrier*>(cta.shared.data() + copy.barrier);
  barrier.bytes -= static_cast<int32_t>(copy.bytes);
  settle(barrier);
  ++progress;
}

void deliver(Cta& cta, std::mt19937& random) {
  while (!cta.copies.empty() && random() % 4 != 0) {
    std::swap(cta.copies[random() % cta.copies.size()], cta.copies.back());
    const Copy copy = cta.copies.back();
    cta.copies.pop_back();
    arrive_at(cta, copy);
  }
}

void advance(Fiber& fiber) {
  if (fiber.is_done) return;
  current = &fiber;
  switch_stacks(&scheduler_stack, fiber.stack_pointer);
}

// One turn of a CTA: most of its warps, from a random one on.
void advance(Cta& cta, std::vector<Fiber>& fibers, std::mt19937& random) {
  const size_t num_warps = cta.warps.size(), first = random() % num_warps;
  for (size_t i = 0; i < num_warps; ++i) {
    if (random() % 8 == 0) continue;
    const size_t warp = (first + i) % num_warps;
    for (size_t lane = 0; lane < 32; ++lane) advance(fibers[warp * 32 + lane]);
  }
  deliver(cta, random);
}

}  // namespace

void yield() { switch_stacks(&current->stack_pointer, scheduler_stack); }

void fail(const char* what) {
  std::fprintf(stderr, "emulator: CTA %u thread %u: %s\n", current->block.x, current->thread.x, what);
  std::abort();
}

// 0; 1 if the threads await each other for ever.
int run(int count, int num_threads, int shared_bytes, unsigned seed, const std::function<void(char*)>& kernel, int of_cluster) {
  num_ctas = count;
  cluster_size = of_cluster;
  std::mt19937 random(seed);
  entry = &kernel;
  std::vector<Cta> ctas(num_ctas);
  std::vector<NamedBarrier> clusters((num_ctas + cluster_size - 1) / cluster_size);
  std::vector<std::vector<Fiber>> fibers(num_ctas);
  for (int c = 0; c < num_ctas; ++c) {
    ctas[c].shared.assign(shared_bytes, static_cast<char>(0xff));
    ctas[c].warps.resize(num_threads / 32);
    ctas[c].cluster = &clusters[c / cluster_size];
    fibers[c] = std::vector<Fiber>(num_threads);
    for (int t = 0; t < num_threads; ++t) {
      fibers[c][t].thread.x = t, fibers[c][t].block.x = c, fibers[c][t].cta = &ctas[c];
      prepare(fibers[c][t]);
    }
  }
  int idle = 0;
  for (size_t done = 0; done < ctas.size() && idle < kMostIdleRounds;) {
    const unsigned long before = progress;
    done = 0;
    for (int c = 0; c < num_ctas; ++c) {
      if (random() % 4 != 0) advance(ctas[c], fibers[c], random);
      bool ended = ctas[c].copies.empty();
      for (const Fiber& fiber : fibers[c]) ended &= fiber.is_done;
      done += ended;
    }
    idle = progress == before ? idle + 1 : 0;
  }
  return idle < kMostIdleRounds ? 0 : 1;
}

}  // namespace emulator
