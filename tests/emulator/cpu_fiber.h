// Fibers of the CUDA emulator: pooled stacks with guard pages and a context switch without system calls.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CPU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define CPU_ASAN 0
#endif

#if !defined(__x86_64__) || defined(CPU_UCONTEXT)
#define CPU_USE_UCONTEXT 1
#include <ucontext.h>
#else
#define CPU_USE_UCONTEXT 0
#endif

namespace cpu {

// What is left of a suspended fiber, and what the sanitizer has to know of its stack.
struct Context {
#if CPU_USE_UCONTEXT
  ucontext_t uc;
#endif
  void* sp = nullptr;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
};

#if !CPU_USE_UCONTEXT
// Saves the callee-saved registers on the old stack and takes them from the new one. The floating-point control words
// are the same in every fiber, so they stay; swapcontext would add two sigprocmask calls for each switch.
__attribute__((naked, noinline)) inline void raw_switch(void** /*save*/, void* /*load*/) {
  asm volatile(
      "pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
      "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
      "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret\n\t");
}
#endif

// Leaves `from` for `to`; returns when something switches back. `last` says that `from` never runs again.
inline void switch_context(Context& from, Context& to, bool last = false) {
#if CPU_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_size);
#else
  (void)last;
#endif
#if CPU_USE_UCONTEXT
  swapcontext(&from.uc, &to.uc);
#else
  raw_switch(&from.sp, to.sp);
#endif
#if CPU_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// First thing a fiber does. Tells the sanitizer that it has arrived and learns the stack of who started it.
inline void enter_fiber(Context& starter) {
#if CPU_ASAN
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (starter.stack_bottom == nullptr) starter.stack_bottom = bottom, starter.stack_size = size;
#else
  (void)starter;
#endif
}

// Stacks are kept for the life of the process. The distance between two is no power of two, else the tops of hundreds
// of stacks would share a few cache sets.
class StackPool {
 public:
#if CPU_ASAN
  static constexpr size_t kUsable = 256 << 10;  // instrumented frames are several times larger
#else
  static constexpr size_t kUsable = 64 << 10;
#endif
  static constexpr size_t kPage = 4096, kStride = kUsable + kPage, kChunk = 64, kGuarded = 16384;

  uint8_t* bottom(size_t i) {
    while (i >= chunks_.size() * kChunk) grow();
    return chunks_[i / kChunk] + (i % kChunk) * kStride + kPage;
  }

  // Prepares stack i so that the first switch to `c` calls `entry`.
  void prepare(size_t i, Context& c, void (*entry)()) {
    uint8_t* low = bottom(i);
#if CPU_ASAN
    __asan_unpoison_memory_region(low, kUsable);  // frames of an abandoned fiber have left their red zones behind
#endif
    const size_t colour = (i * 7 % 61) * 64;
    c.stack_bottom = low;
    c.stack_size = kUsable;
    c.fake_stack = nullptr;
#if CPU_USE_UCONTEXT
    getcontext(&c.uc);
    c.uc.uc_stack.ss_sp = low;
    c.uc.uc_stack.ss_size = kUsable - colour;
    c.uc.uc_link = nullptr;
    makecontext(&c.uc, entry, 0);
#else
    auto** top = reinterpret_cast<void**>(low + kUsable - colour);
    *--top = nullptr;                         // where entry would return to: it never does
    *--top = reinterpret_cast<void*>(entry);  // popped by ret, which leaves rsp = 8 mod 16 as the ABI wants
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    c.sp = top;
#endif
  }

 private:
  void grow() {
    void* p =
        mmap(nullptr, kChunk * kStride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      std::perror("emulator: no memory for fiber stacks");
      std::abort();
    }
    // Each guard page costs two of the process's mappings, of which Linux gives 65530 (vm.max_map_count). A grid with
    // more threads than that leaves the later stacks unguarded, as otherwise malloc would fail.
    const bool guarded = (chunks_.size() + 1) * kChunk <= kGuarded;
    for (size_t i = 0; i < kChunk && guarded; ++i) {
      mprotect(static_cast<uint8_t*>(p) + i * kStride, kPage, PROT_NONE);
    }
    chunks_.push_back(static_cast<uint8_t*>(p));
  }
  std::vector<uint8_t*> chunks_;
};

// xorshift64*: a few cycles a draw, and the same numbers on every machine.
struct Random {
  uint64_t s = 0x9E3779B97F4A7C15ull;
  void seed(uint64_t x) {
    s = (x + 1) * 0x9E3779B97F4A7C15ull;
    s ^= s >> 31;
    if (s == 0) s = 1;
    for (int i = 0; i < 4; ++i) next();
  }
  uint64_t next() {
    s ^= s >> 12, s ^= s << 25, s ^= s >> 27;
    return s * 0x2545F4914F6CDD1Dull;
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(((next() >> 32) * n) >> 32); }
  bool chance(uint32_t of_1024) { return (next() >> 54) < of_1024; }
  void fill(void* p, size_t n) {
    auto* b = static_cast<uint8_t*>(p);
    for (; n >= 8; b += 8, n -= 8) {
      const uint64_t v = next();
      std::memcpy(b, &v, 8);
    }
    const uint64_t v = next();
    if (n != 0) std::memcpy(b, &v, n);
  }
};

}  // namespace cpu
