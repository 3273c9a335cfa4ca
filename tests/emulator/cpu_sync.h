// Waiting of the CUDA emulator: warp collectives, block and named barriers, the cluster barrier, the PDL wait.
#pragma once

#include "cpu_sched.h"

namespace cpu {

inline const char* name(Op op) {
  constexpr const char* kNames[] = {"__syncwarp",        "__shfl_sync",       "vote",
                                    "__match_any_sync",  "__match_all_sync",  "__reduce_add_sync",
                                    "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
                                    "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",
                                    "__reduce_xor_sync"};
  return kNames[static_cast<int>(op)];
}

template <class T>
uint64_t to_bits(T v) {
  static_assert(sizeof(T) <= 8, "a warp exchanges values of up to 8 bytes");
  uint64_t b = 0;
  std::memcpy(&b, &v, sizeof v);
  return b;
}
template <class T>
T from_bits(uint64_t b) {
  T v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

// All lanes of the mask have come: gives each its result and wakes those that wait.
inline void complete_meeting(Warp& w, Rendezvous& r) {
  const unsigned lanes = r.arrived;
  r.arrived = 0;
  w.meetings_used &= ~(1u << (&r - w.meetings.data()));
  uint64_t all = 0;
  const unsigned first = static_cast<unsigned>(__builtin_ctz(lanes));
  auto each = [&](auto fn) {
    for (unsigned m = lanes; m != 0; m &= m - 1) fn(static_cast<unsigned>(__builtin_ctz(m)));
  };
  auto fold = [&](auto fn) {
    all = r.value[first];
    each([&](unsigned l) { all = fn(all, r.value[l]); });
  };
  bool common = true;
  switch (r.op) {
    case Op::sync: break;
    case Op::ballot: each([&](unsigned l) { all |= (r.value[l] != 0 ? 1ull : 0ull) << l; }); break;
    case Op::add: each([&](unsigned l) { all += r.value[l]; }); break;
    case Op::min_u: fold([](uint64_t a, uint64_t b) { return std::min(a, b); }); break;
    case Op::max_u: fold([](uint64_t a, uint64_t b) { return std::max(a, b); }); break;
    case Op::min_s:
      fold([](uint64_t a, uint64_t b) { return to_bits(std::min(from_bits<int32_t>(a), from_bits<int32_t>(b))); });
      break;
    case Op::max_s:
      fold([](uint64_t a, uint64_t b) { return to_bits(std::max(from_bits<int32_t>(a), from_bits<int32_t>(b))); });
      break;
    case Op::land: fold([](uint64_t a, uint64_t b) { return a & b; }); break;
    case Op::lor: fold([](uint64_t a, uint64_t b) { return a | b; }); break;
    case Op::lxor: each([&](unsigned l) { all ^= r.value[l]; }); break;
    case Op::match_all: {
      bool same = true;
      each([&](unsigned l) { same &= r.value[l] == r.value[first]; });
      all = same ? r.mask : 0;
      break;
    }
    case Op::match_any:
      common = false;
      each([&](unsigned l) {
        uint64_t m = 0;
        each([&](unsigned o) { m |= (r.value[o] == r.value[l] ? 1ull : 0ull) << o; });
        w.fibers[l].result = m;
      });
      break;
    case Op::shfl:
      common = false;
      each([&](unsigned l) {
        const int s = r.source[l];
        w.fibers[l].result = (lanes >> s) & 1 ? r.value[s] : st.random.next();  // an absent lane's value is undefined
      });
      break;
  }
  if (common) each([&](unsigned l) { w.fibers[l].result = all; });
  achieved();
  make_ready(w, lanes);
}

inline uint64_t warp_meet(Op op, unsigned mask, uint64_t value, int source, const char* file, int line) {
  point();
  Fiber& f = *st.current;
  Warp& w = *f.warp;
  ++st.stats.collectives;
  if (((mask >> f.lane) & 1) == 0)
    fail(std::string(name(op)) + " at " + place(file, line) + ": lane " + std::to_string(f.lane) +
         " is not in its own mask");
  const bool by_site = st.options.strict_sites != 0 && op != Op::sync;
  Rendezvous* r = nullptr;
  for (unsigned m = w.meetings_used; m != 0; m &= m - 1) {
    Rendezvous& x = w.meetings[static_cast<size_t>(__builtin_ctz(m))];
    if (x.mask == mask && x.op == op && (!by_site || (x.line == line && x.file == file))) r = &x;
  }
  if (r == nullptr) {
    const unsigned free = static_cast<unsigned>(__builtin_ctz(~w.meetings_used));
    w.meetings_used |= 1u << free;
    r = &w.meetings[free];
    r->mask = mask, r->arrived = 0, r->op = op, r->file = file, r->line = line;
  }
  r->arrived |= 1u << f.lane;
  r->value[f.lane] = value;
  r->source[f.lane] = static_cast<int8_t>(source);
  if ((mask & w.live & ~r->arrived) == 0) complete_meeting(w, *r);
  // the last to come queues with the others, else the same lanes would always run ahead
  block_here(name(op), file, line);
  return f.result;
}

inline void check_barrier(Block& b, Barrier& bar) {
  if (bar.arrived < (bar.expected != 0 ? bar.expected : b.live)) return;
  const uint64_t result = bar.reduce == Reduce::any ? bar.any : bar.reduce == Reduce::all ? bar.all : bar.count;
  for (Fiber* f : bar.waiting) f->result = result, make_ready(*f);
  auto keep = std::move(bar.waiting);
  keep.clear();
  bar = Barrier{};
  bar.waiting = std::move(keep);  // its capacity
  ++st.stats.barriers;
  achieved();
}

inline uint64_t block_barrier(unsigned id, unsigned count, bool wait, Reduce reduce, bool predicate, const char* what,
                              const char* file, int line) {
  point();
  Fiber& f = *st.current;
  Block& b = *f.warp->block;
  if (id >= b.barriers.size()) fail(std::string(what) + " at " + place(file, line) + ": barrier " + std::to_string(id));
  if (count % 32 != 0 || count > b.fibers.size())
    fail(std::string(what) + " at " + place(file, line) + ": " + std::to_string(count) + " threads");
  Barrier& bar = b.barriers[id];
  if (bar.arrived != 0) {
    if (bar.expected != count || bar.reduce != reduce)
      fail(std::string(what) + " at " + place(file, line) + " meets another kind of barrier at " +
           place(bar.file, bar.line));
    if (id == 0 && count == 0 && st.options.strict_sites != 0 && (bar.line != line || bar.file != file))
      fail("divergent barrier: " + std::string(what) + " at " + place(file, line) + ", other threads at " +
           place(bar.file, bar.line) + describe_waits());
  }
  bar.expected = count, bar.reduce = reduce, bar.file = file, bar.line = line;
  bar.any |= predicate, bar.all &= predicate, bar.count += predicate;
  ++bar.arrived;
  if (wait) bar.waiting.push_back(&f);
  check_barrier(b, bar);
  if (!wait) return 0;
  block_here(what, file, line);
  return f.result;
}

// bar.sync id, count and bar.arrive id, count (count in threads, a multiple of 32).
inline void named_barrier(unsigned id, unsigned count, const char* file = __builtin_FILE(),
                          int line = __builtin_LINE()) {
  block_barrier(id, count, true, Reduce::none, false, "named barrier", file, line);
}
inline void named_barrier_arrive(unsigned id, unsigned count, const char* file = __builtin_FILE(),
                                 int line = __builtin_LINE()) {
  block_barrier(id, count, false, Reduce::none, false, "named barrier", file, line);
}

// ---- clusters

inline void check_cluster(Cluster& c) {
  if (c.live == 0 || c.arrived < c.live) return;
  c.arrived = 0;
  ++c.phase;
  for (Fiber* f : c.waiting) make_ready(*f);
  c.waiting.clear();
  ++st.stats.barriers;
  achieved();
}

inline void cluster_arrive(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  point();
  Fiber& f = *st.current;
  Cluster& c = *f.warp->block->cluster;
  if (f.cluster_arrived) fail("cluster_arrive twice without a wait at " + place(file, line));
  f.cluster_arrived = true;
  f.cluster_phase = c.phase;
  ++c.arrived;
  check_cluster(c);
  point();
}

inline void cluster_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Fiber& f = *st.current;
  Cluster& c = *f.warp->block->cluster;
  if (!f.cluster_arrived) fail("cluster_wait without an arrival at " + place(file, line));
  if (f.cluster_phase == c.phase) {
    c.waiting.push_back(&f);
    block_here("cluster barrier", file, line);
  }
  f.cluster_arrived = false;
  point();
}

inline unsigned cluster_rank() { return st.current->warp->block->rank; }
inline unsigned cluster_size() { return st.launch.cluster; }
inline unsigned cluster_id() { return st.current->warp->block->index.x / st.launch.cluster; }

// ---- shared memory

inline uint8_t* dynamic_smem() { return st.current->warp->block->smem; }
inline size_t dynamic_smem_size() { return st.current->warp->block->smem_size; }

// The block of the running cluster whose shared memory holds p, or nullptr.
inline Block* owner_of(const void* p) {
  for (Block* b : st.current->warp->block->cluster->blocks) {
    const auto* q = static_cast<const uint8_t*>(p);
    if (b->smem != nullptr && q >= b->smem && q <= b->smem + b->smem_size) return b;
  }
  return nullptr;
}

// mapa: the address in block `rank` that lies where `own` lies in this block.
template <class T>
T* map_shared(T* own, unsigned rank, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block& b = *st.current->warp->block;
  const auto offset = reinterpret_cast<const uint8_t*>(own) - b.smem;
  if (rank >= b.cluster->blocks.size()) fail("map_shared at " + place(file, line) + ": rank " + std::to_string(rank));
  if (offset < 0 || static_cast<size_t>(offset) > b.smem_size)
    fail("map_shared at " + place(file, line) + ": not an address of this block's shared memory");
  Block& peer = *b.cluster->blocks[rank];
  if (peer.smem == nullptr)
    fail("map_shared at " + place(file, line) + ": block " + std::to_string(peer.index.x) + " (rank " +
         std::to_string(rank) + ") has exited");
  if (!peer.started)
    fail("map_shared at " + place(file, line) + ": block " + std::to_string(peer.index.x) + " (rank " +
         std::to_string(rank) + ") has not started");
  return reinterpret_cast<T*>(peer.smem + offset);
}

}  // namespace cpu
