// Scheduler of the CUDA emulator: threads, warps, blocks and clusters as fibers that run in a random, seeded order.
//
// A thread runs until it waits (barrier, warp collective, mbarrier, ...) or until a preemption point. Who runs next is
// drawn by one of four schedules, because different faults need different orders: a race between neighbours shows under
// "random", a warp that overtakes a slow one under "burst" and "priority".
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "cpu_fiber.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace cpu {

enum class Schedule : int { random, burst, priority, in_order, count };
enum class Latency : int { eager, medium, lazy, count };  // of asynchronous copies

// How to run a launch. -1 = drawn from the seed.
struct Options {
  uint64_t seed = 0;
  int schedule = -1;
  int preempt = -1;  // chance in 1024 to leave a thread at an atomic, a synchronisation or point()
  int latency = -1;
  int resident = -1;     // clusters (blocks, without clusters) on the device at once
  int strict_sites = 1;  // a barrier or value-exchanging collective must be met at one source line
  bool pdl = false;      // the launch overlaps with its predecessor until the dependency wait
  uint64_t max_switches = 100'000'000;
};

struct Stats {
  uint64_t switches = 0, collectives = 0, barriers = 0, atomics = 0, async_copies = 0, spins = 0;
};

enum class Op : uint8_t { sync, shfl, ballot, match_any, match_all, add, min_u, max_u, min_s, max_s, land, lor, lxor };
enum class Reduce : uint8_t { none, any, all, count };

struct Block;
struct Cluster;
struct Warp;

struct DeferredCopy {
  uint64_t group;
  void* dst;
  const void* src;
  unsigned bytes, zero_from;
};

struct Fiber {
  Context ctx;
  Warp* warp = nullptr;
  uint3 tid{};
  unsigned lane = 0;
  bool done = false, pdl_waited = false, cluster_arrived = false;
  uint64_t cluster_phase = 0;
  uint64_t result = 0;             // of the collective or barrier it waited for
  const char* waits_at = nullptr;  // what, file and line of the wait, for reports
  const char* file = "";
  int line = 0;
  uint64_t copy_groups = 0;  // cp.async groups committed so far
  uint64_t bulk_groups = 0;  // bulk groups committed so far
  std::vector<DeferredCopy> copies;
};

struct Rendezvous {
  unsigned mask = 0, arrived = 0;
  Op op = Op::sync;
  const char* file = nullptr;
  int line = 0;
  uint64_t value[32];
  int8_t source[32];
};

struct Warp {
  Block* block = nullptr;
  Fiber* fibers = nullptr;
  unsigned live = 0, ready = 0;
  int position = -1;  // in the list of warps that have a ready lane
  int64_t priority = 0;
  std::array<Rendezvous, 32> meetings;  // a lane is in one at most
  unsigned meetings_used = 0;           // bit set
};

struct Barrier {
  unsigned arrived = 0, expected = 0;  // expected 0 = every live thread of the block
  Reduce reduce = Reduce::none;
  const char* file = nullptr;
  int line = 0;
  unsigned any = 0, all = 1, count = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  uint3 index{};
  Cluster* cluster = nullptr;
  unsigned rank = 0, live = 0;
  bool started = false;  // some thread has run: before that a peer must not touch its shared memory
  size_t first_stack = 0, smem_size = 0;
  uint8_t* smem = nullptr;  // nullptr once the block has exited
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::array<Barrier, 16> barriers;
};

struct Cluster {
  std::vector<Block*> blocks;
  unsigned live = 0, arrived = 0;
  uint64_t phase = 0;
  bool used = false;
  std::vector<Fiber*> waiting;
};

struct Launch {
  dim3 grid, block;
  size_t smem = 0;
  unsigned cluster = 1;
};

struct State {
  Options options;
  Stats stats;
  Random random;
  Schedule schedule = Schedule::random;
  Latency latency = Latency::medium;
  unsigned preempt = 0, lane_order = 0;
  Context main;
  StackPool stacks;
  Fiber* current = nullptr;
  Warp* last_warp = nullptr;
  std::vector<Warp*> ready;
  std::vector<std::pair<uint64_t, Fiber*>> stalled;  // threads that were preempted for long, and until which switch
  std::vector<std::pair<uint64_t, Block*>> late;     // blocks that start only then
  std::vector<std::unique_ptr<Cluster>> slots;
  std::vector<std::unique_ptr<Block>> blocks;
  std::function<void()> body;
  Launch launch;
  std::string error;
  int64_t lowest_priority = 0;
  uint64_t spins = 0;     // since something was achieved
  uint64_t releases = 0;  // of stalled threads, since then
  bool spinning = false;  // the pick follows a spin: take any warp, whatever the schedule
  bool finished_block = false;
};
inline State st;

// Set by cpu_async.h: completes a pending asynchronous operation, false when there is none; and clean-up of a block.
bool complete_one_async();
void tick_async();
void forget_block(Block& b);
std::string describe_async();

[[noreturn]] inline void fail(const std::string& text);

inline std::string place(const char* file, int line) {
  const char* slash = std::strrchr(file, '/');
  return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

// "block 3: 480 threads (0..) at __syncthreads a.cuh:12; ..." for every block on the device.
inline std::string describe_waits() {
  std::string out;
  for (auto& b : st.blocks) {
    if (b->live == 0) continue;
    std::vector<std::pair<std::string, std::vector<unsigned>>> groups;
    unsigned t = 0, exited = 0;
    for (auto& f : b->fibers) {
      const unsigned id = t++;
      if (f.done) {
        ++exited;
        continue;
      }
      const bool ready = (f.warp->ready >> f.lane) & 1;
      std::string what = ready ? "ready" : f.waits_at == nullptr ? "running" : f.waits_at;
      if (f.waits_at != nullptr) what += " " + place(f.file, f.line);
      auto g = std::find_if(groups.begin(), groups.end(), [&](auto& x) { return x.first == what; });
      if (g == groups.end())
        groups.push_back({what, {id}});
      else
        g->second.push_back(id);
    }
    out += "\n  block " + std::to_string(b->index.x) +
           (b->cluster->blocks.size() > 1 ? " (rank " + std::to_string(b->rank) + ")" : "") + ":";
    for (auto& g : groups) {
      out += " " + std::to_string(g.second.size()) + " threads (";
      for (size_t i = 0; i < g.second.size() && i < 4; ++i) out += (i ? "," : "") + std::to_string(g.second[i]);
      out += std::string(g.second.size() > 4 ? ",..) " : ") ") + g.first + ";";
    }
    out += " " + std::to_string(exited) + " exited";
    if (out.size() > 6000) return out + "\n  ...";
  }
  return out + describe_async();
}

inline void fail(const std::string& text) {
  if (st.error.empty()) {
    st.error = text;
    if (st.current != nullptr) {
      const Fiber& f = *st.current;
      st.error += " [block " + std::to_string(f.warp->block->index.x) + ", thread " + std::to_string(f.tid.x) + "]";
    }
  }
  if (st.current != nullptr) {
    Fiber* f = st.current;
    st.current = nullptr;
    switch_context(f->ctx, st.main, true);
  }
  std::abort();  // nobody resumes an abandoned fiber, and set-up code does not come here
}

inline void make_ready(Warp& w, unsigned lanes) {
  if (lanes == 0) return;
  if (w.ready == 0) {
    w.position = static_cast<int>(st.ready.size());
    st.ready.push_back(&w);
  }
  w.ready |= lanes;
}
inline void make_ready(Fiber& f) { make_ready(*f.warp, 1u << f.lane); }

inline Warp* pick_warp() {
  auto& r = st.ready;
  if (st.spinning || st.schedule == Schedule::random) return r[st.random.below(static_cast<uint32_t>(r.size()))];
  if (st.schedule == Schedule::burst) {
    if (st.last_warp != nullptr && st.last_warp->ready != 0) return st.last_warp;
    return r[st.random.below(static_cast<uint32_t>(r.size()))];
  }
  if (st.schedule == Schedule::priority && st.random.chance(2)) {
    // a change point: some warp falls behind, or leaps ahead
    r[st.random.below(static_cast<uint32_t>(r.size()))]->priority =
        st.random.chance(512) ? --st.lowest_priority : static_cast<int64_t>(st.random.next() >> 34);
  }
  return *std::max_element(r.begin(), r.end(), [](Warp* a, Warp* b) { return a->priority < b->priority; });
}

// Those whose time has come run again; all of them when nobody else can.
inline void release_stalled(bool all) {
  size_t kept = 0;
  for (auto& x : st.stalled) {
    if (all || x.first <= st.stats.switches)
      make_ready(*x.second);
    else
      st.stalled[kept++] = x;
  }
  st.stalled.resize(kept);
  kept = 0;
  for (auto& x : st.late) {
    if (all || x.first <= st.stats.switches)
      for (auto& w : x.second->warps) make_ready(w, w.live);
    else
      st.late[kept++] = x;
  }
  st.late.resize(kept);
}
inline bool someone_stalled() { return !st.stalled.empty() || !st.late.empty(); }

// Takes the next thread to run out of the ready set; nullptr = nothing can ever run again.
inline Fiber* pick() {
  tick_async();
  if (someone_stalled()) release_stalled(st.ready.empty());
  while (st.ready.empty())
    if (!complete_one_async()) return nullptr;
  Warp* w = pick_warp();
  const unsigned m = w->ready;
  unsigned lane;
  if (st.lane_order == 1)
    lane = static_cast<unsigned>(__builtin_ctz(m));
  else if (st.lane_order == 2)
    lane = 31u - static_cast<unsigned>(__builtin_clz(m));
  else {
    const unsigned r = static_cast<unsigned>(st.random.next() >> 59);
    const unsigned turned = r == 0 ? m : (m >> r) | (m << (32 - r));
    lane = (static_cast<unsigned>(__builtin_ctz(turned)) + r) & 31;
  }
  w->ready = m & ~(1u << lane);
  if (w->ready == 0) {
    st.ready.back()->position = w->position;
    st.ready[static_cast<size_t>(w->position)] = st.ready.back();
    st.ready.pop_back();
  }
  st.last_warp = w;
  return &w->fibers[lane];
}

inline void install(Fiber& f) {
  if (!st.error.empty()) fail("");  // an asynchronous copy went wrong meanwhile
  st.current = &f;
  threadIdx = f.tid;
  blockIdx = f.warp->block->index;
  if (++st.stats.switches > st.options.max_switches)
    fail("gave up after " + std::to_string(st.options.max_switches) + " switches:" + describe_waits());
}

inline void switch_to_next() {
  Fiber* self = st.current;
  Fiber* next = pick();
  if (next == nullptr) fail("deadlock: no thread can run:" + describe_waits());
  if (next == self) {
    install(*self);
    return;
  }
  install(*next);
  switch_context(self->ctx, next->ctx);
}

// Gives the processor away until somebody makes this thread ready.
inline void block_here(const char* what, const char* file, int line) {
  Fiber& f = *st.current;
  f.waits_at = what, f.file = file, f.line = line;
  switch_to_next();
  f.waits_at = nullptr;
}

inline void achieved() { st.spins = st.releases = 0; }

// A spinning thread lets others run. Used by loops that wait for another block or for an asynchronous copy.
inline void backoff(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Fiber& f = *st.current;
  f.waits_at = "spins at", f.file = file, f.line = line;
  ++st.stats.spins;
  if (++st.spins > 200'000 + 2000 * st.ready.size()) {
    // a copy under way or a stalled thread may be what they wait for; but a spinning thread can itself be stalled
    const bool pending = complete_one_async() || (someone_stalled() && ++st.releases < 4);
    release_stalled(true);
    st.spins = 0;
    if (!pending) fail("livelock: every thread that can run spins:" + describe_waits());
  }
  f.warp->priority = --st.lowest_priority;
  make_ready(f);
  st.spinning = true;
  if (st.random.chance(64)) complete_one_async();
  switch_to_next();
  st.spinning = false;
  f.waits_at = nullptr;
}

// A place where a real GPU may run anything else in between: with the launch's chance another thread goes on. Sometimes
// for long, so that whole phases of other warps and blocks fit between two neighbouring instructions of this thread.
inline void leave_for_others(uint32_t stall_chance, size_t most) {
  if (st.stalled.size() < most && st.random.chance(stall_chance))
    st.stalled.push_back({st.stats.switches + st.random.below(20'000), st.current});
  else
    make_ready(*st.current);
  st.spinning = true;
  switch_to_next();
  st.spinning = false;
}
inline void point() {
  if (st.preempt != 0 && st.random.chance(st.preempt)) leave_for_others(32, 4);
}
// The same around an atomic. Blocks talk to each other through these, so long stalls are more frequent.
inline void atomic_point() {
  if (st.preempt != 0 && st.random.chance(std::max(st.preempt, 64u))) leave_for_others(256, 24);
}

void complete_meeting(Warp& w, Rendezvous& r);
void check_barrier(Block& b, Barrier& bar);
void check_cluster(Cluster& c);

inline void leave_thread() {
  Fiber& f = *st.current;
  Warp& w = *f.warp;
  Block& b = *w.block;
  achieved();
  f.done = true;
  w.live &= ~(1u << f.lane);
  --b.live;
  // those who wait for "all live threads" may be complete now
  for (unsigned m = w.meetings_used; m != 0; m &= m - 1) {
    Rendezvous& r = w.meetings[static_cast<size_t>(__builtin_ctz(m))];
    if ((r.mask & w.live & ~r.arrived) == 0) complete_meeting(w, r);
  }
  for (auto& bar : b.barriers)
    if (bar.arrived != 0 && bar.expected == 0) check_barrier(b, bar);
  Cluster& c = *b.cluster;
  --c.live;
  if (f.cluster_arrived && f.cluster_phase == c.phase) --c.arrived;
  check_cluster(c);
  if (b.live == 0) {
    forget_block(b);
    st.finished_block = true;
  }
  st.current = nullptr;
  if (st.finished_block || (st.ready.empty() && !someone_stalled() && !complete_one_async())) {
    switch_context(f.ctx, st.main, true);
    std::abort();
  }
  st.spinning = false;
  Fiber* next = pick();
  if (next == nullptr) switch_context(f.ctx, st.main, true);
  st.current = &f;  // only so that install() may fail from here
  install(*next);
  switch_context(f.ctx, next->ctx, true);
  std::abort();
}

inline void fiber_entry() {
  enter_fiber(st.main);
  st.current->warp->block->started = true;
  st.body();
  leave_thread();
}

}  // namespace cpu
