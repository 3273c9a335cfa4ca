// Asynchronous hardware of the CUDA emulator: mbarriers, bulk copies, cp.async groups, programmatic dependent launch.
//
// A copy happens at a random later time, at the latest when nothing else can run; until then its target holds garbage.
// So whoever reads without waiting, or waits for the wrong phase, computes nonsense or hangs, and both are noticed.
#pragma once

#include "cpu_sync.h"

namespace cpu {

struct Mbarrier {
  uint64_t word = 0;  // what its 8 bytes of shared memory must still hold
  unsigned expected = 0, pending = 0;
  int64_t tx = 0;      // bytes announced and not yet arrived
  unsigned phase = 0;  // the one in progress; its lowest bit is the parity
  Block* block = nullptr;
  std::vector<Fiber*> waiting;
};

struct AsyncCopy {
  uint8_t* dst;
  const uint8_t* src;
  size_t bytes;
  uint64_t* bar;
  Block* dst_block;  // nullptr = global memory
  Block* src_block;
  Fiber* issuer;  // of a bulk group
  uint64_t group;
  std::vector<uint8_t> snapshot;
  bool has_snapshot;
};

struct GlobalRange {
  const uint8_t* base;
  size_t bytes;
};

struct Async {
  std::unordered_map<uint64_t*, Mbarrier> bars;
  std::vector<AsyncCopy> pending;
  std::vector<GlobalRange> ranges;   // all of global memory, when the runner knows it
  std::function<void()> prior_grid;  // what the preceding launch writes; runs when it "completes"
  bool prior_running = false;
  std::vector<Fiber*> prior_waiting;
};
inline Async async;

// ---- mbarrier

inline Mbarrier& find_bar(uint64_t* bar, const char* what) {
  auto it = async.bars.find(bar);
  if (it == async.bars.end())
    fail(std::string(what) + " on an mbarrier that was not initialised (or whose block has exited)");
  if (*bar != it->second.word) fail(std::string(what) + " on an mbarrier whose memory was overwritten");
  return it->second;
}

inline void check_phase(Mbarrier& m) {
  if (m.pending != 0 || m.tx != 0) return;
  ++m.phase;
  m.pending = m.expected;
  for (Fiber* f : m.waiting) make_ready(*f);
  m.waiting.clear();
  achieved();
}

inline void mbarrier_init(uint64_t* bar, unsigned count) {
  if (reinterpret_cast<uintptr_t>(bar) % 8 != 0) fail("mbarrier_init: the address is not a multiple of 8");
  if (count == 0 || count >= (1u << 20)) fail("mbarrier_init: count " + std::to_string(count));
  Mbarrier m;
  m.word = st.random.next();
  m.expected = m.pending = count;
  m.block = owner_of(bar);
  if (m.block == nullptr) fail("mbarrier_init: not in shared memory");
  *bar = m.word;
  async.bars[bar] = m;
  point();
}
inline void mbarrier_inval(uint64_t* bar) {
  find_bar(bar, "mbarrier_inval");
  async.bars.erase(bar);
}

inline void mbarrier_arrive(uint64_t* bar, unsigned count = 1) {
  point();
  Mbarrier& m = find_bar(bar, "mbarrier_arrive");
  if (m.pending < count) fail("mbarrier_arrive: more arrivals than the phase expects");
  m.pending -= count;
  check_phase(m);
}
inline void mbarrier_expect_tx(uint64_t* bar, unsigned bytes) {
  Mbarrier& m = find_bar(bar, "mbarrier_expect_tx");
  m.tx += bytes;
}
inline void mbarrier_arrive_expect_tx(uint64_t* bar, unsigned bytes) {
  point();
  Mbarrier& m = find_bar(bar, "mbarrier_arrive_expect_tx");
  if (m.pending < 1) fail("mbarrier_arrive_expect_tx: more arrivals than the phase expects");
  m.tx += bytes;
  m.pending -= 1;
  check_phase(m);
}

inline bool phase_done(const Mbarrier& m, unsigned parity) { return (m.phase & 1) != (parity & 1); }

// One try: true when the phase of this parity is over. May be called in a loop of the caller's.
inline bool mbarrier_try_wait(uint64_t* bar, unsigned parity, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  if (phase_done(find_bar(bar, "mbarrier_try_wait"), parity)) return true;
  backoff(file, line);
  return phase_done(find_bar(bar, "mbarrier_try_wait"), parity);
}
inline bool mbarrier_test_wait(uint64_t* bar, unsigned parity) {
  point();
  return phase_done(find_bar(bar, "mbarrier_test_wait"), parity);
}
// try_wait until it is true, without burning switches.
inline void mbarrier_wait(uint64_t* bar, unsigned parity, const char* file = __builtin_FILE(),
                          int line = __builtin_LINE()) {
  point();
  for (;;) {
    Mbarrier& m = find_bar(bar, "mbarrier_wait");
    if (phase_done(m, parity)) return;
    m.waiting.push_back(st.current);
    block_here(parity & 1 ? "mbarrier_wait parity 1" : "mbarrier_wait parity 0", file, line);
  }
}

// ---- bulk copies

inline bool in_global(const void* p, size_t n) {
  if (async.ranges.empty()) return true;
  const auto* q = static_cast<const uint8_t*>(p);
  for (auto& r : async.ranges)
    if (q >= r.base && q + n <= r.base + r.bytes) return true;
  return false;
}

inline void do_copy(const AsyncCopy& c) {
  if (c.dst_block != nullptr && c.dst_block->smem == nullptr) {
    if (st.error.empty()) st.error = "a bulk copy arrived in the shared memory of a block that has exited";
    return;
  }
  if (!c.has_snapshot && c.src_block != nullptr && c.src_block->smem == nullptr) {
    if (st.error.empty()) st.error = "a bulk copy reads the shared memory of a block that has exited";
    return;
  }
  std::memcpy(c.dst, c.has_snapshot ? c.snapshot.data() : c.src, c.bytes);
  if (c.bar != nullptr) {
    auto it = async.bars.find(c.bar);
    if (it == async.bars.end() || *c.bar != it->second.word) {
      if (st.error.empty()) st.error = "a bulk copy completed on an mbarrier that is not there any more";
      return;
    }
    it->second.tx -= static_cast<int64_t>(c.bytes);
    check_phase(it->second);
  }
}

inline void issue(uint8_t* dst, const uint8_t* src, size_t bytes, uint64_t* bar, const char* what, bool to_shared,
                  bool from_shared) {
  auto bad = [&](const char* why) { fail(std::string(what) + ": " + why); };
  if (reinterpret_cast<uintptr_t>(dst) % 16 != 0) bad("the target is not 16-byte aligned");
  if (reinterpret_cast<uintptr_t>(src) % 16 != 0) bad("the source is not 16-byte aligned");
  if (bytes % 16 != 0) bad("the size is not a multiple of 16");
  Block* db = owner_of(dst);
  Block* sb = owner_of(src);
  if (to_shared && (db == nullptr || dst + bytes > db->smem + db->smem_size))
    bad("the target is not within a block's shared memory");
  if (from_shared && (sb == nullptr || src + bytes > sb->smem + sb->smem_size))
    bad("the source is not within a block's shared memory");
  if (!to_shared && !in_global(dst, bytes)) bad("the target is not within one global buffer");
  if (!from_shared && !in_global(src, bytes)) bad("the source is not within one global buffer");
  if (bar != nullptr) find_bar(bar, what);
  if (bytes == 0) return;
  AsyncCopy c{dst,
              src,
              bytes,
              bar,
              to_shared ? db : nullptr,
              from_shared ? sb : nullptr,
              st.current,
              0,
              {},
              st.random.chance(512)};
  c.group = st.current->bulk_groups;
  if (c.has_snapshot) c.snapshot.assign(src, src + bytes);  // the source may be read at once or late
  if (to_shared) st.random.fill(dst, bytes);
  ++st.stats.async_copies;
  async.pending.push_back(std::move(c));
  point();
}

inline void bulk_global_to_shared(void* dst, const void* src, unsigned bytes, uint64_t* bar) {
  issue(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), bytes, bar, "bulk copy global to shared", true,
        false);
}
// Into the same or another block of the cluster; dst and bar from map_shared.
inline void bulk_shared_to_cluster(void* dst, const void* src, unsigned bytes, uint64_t* bar) {
  issue(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), bytes, bar, "bulk copy shared to cluster", true,
        true);
}
// To the same offset of every block in the mask, each on its own mbarrier.
inline void bulk_multicast(void* dst, const void* src, unsigned bytes, uint64_t* bar, unsigned mask) {
  for (unsigned r = 0; r < cluster_size(); ++r)
    if ((mask >> r) & 1)
      bulk_global_to_shared(map_shared(static_cast<uint8_t*>(dst), r), src, bytes, map_shared(bar, r));
}
inline void bulk_shared_to_global(void* dst, const void* src, unsigned bytes) {
  issue(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), bytes, nullptr, "bulk copy shared to global",
        false, true);
}
inline void bulk_commit_group() { ++st.current->bulk_groups; }
// Waits until at most n of this thread's bulk groups are not complete.
inline void bulk_wait_group(unsigned n) {
  const Fiber* f = st.current;
  point();
  for (size_t i = 0; i < async.pending.size();) {
    AsyncCopy& c = async.pending[i];
    if (c.issuer == f && c.bar == nullptr && c.group + n < f->bulk_groups) {
      do_copy(c);
      async.pending.erase(async.pending.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
}
inline void bulk_prefetch(const void* src, unsigned bytes) {
  if (reinterpret_cast<uintptr_t>(src) % 16 != 0 || bytes % 16 != 0)
    fail("bulk prefetch: address or size is not a multiple of 16");
  // What lies beyond an array is no error on a GPU; here it shows that the places were found wrongly.
  static volatile uint8_t touched;
  for (unsigned at = 0; at < bytes; at += 16) touched = static_cast<const volatile uint8_t*>(src)[at];
}

// ---- cp.async: 4, 8 or 16 bytes a thread, visible to the issuing thread after its wait

inline void do_deferred(const DeferredCopy& c) {
  std::memcpy(c.dst, c.src, c.zero_from);
  if (c.zero_from < c.bytes) std::memset(static_cast<uint8_t*>(c.dst) + c.zero_from, 0, c.bytes - c.zero_from);
}

// src_bytes < bytes fills the rest with zeros.
inline void cp_async(void* dst, const void* src, unsigned bytes, unsigned src_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of " + std::to_string(bytes) + " bytes");
  if (reinterpret_cast<uintptr_t>(dst) % bytes != 0 || reinterpret_cast<uintptr_t>(src) % bytes != 0)
    fail("cp.async: an address is not a multiple of the size");
  const Block* b = st.current->warp->block;
  if (static_cast<uint8_t*>(dst) < b->smem || static_cast<uint8_t*>(dst) + bytes > b->smem + b->smem_size)
    fail("cp.async: the target is not within the block's shared memory");
  Fiber& f = *st.current;
  const DeferredCopy c{f.copy_groups, dst, src, bytes, std::min(bytes, src_bytes)};
  ++st.stats.async_copies;
  if (st.random.chance(256)) {
    do_deferred(c);
  } else {
    st.random.fill(dst, bytes);
    f.copies.push_back(c);
  }
  point();
}
inline void cp_async(void* dst, const void* src, unsigned bytes) { cp_async(dst, src, bytes, bytes); }
inline void cp_async_commit() { ++st.current->copy_groups; }
inline void cp_async_wait_group(unsigned n) {
  Fiber& f = *st.current;
  size_t kept = 0;
  for (auto& c : f.copies) {
    if (c.group + n < f.copy_groups)
      do_deferred(c);
    else
      f.copies[kept++] = c;
  }
  f.copies.resize(kept);
  point();
}
inline void cp_async_wait_all() {
  for (auto& c : st.current->copies) do_deferred(c);
  st.current->copies.clear();
  point();
}

// ---- programmatic dependent launch

inline void finish_prior_grid() {
  if (!async.prior_running) return;
  async.prior_running = false;
  if (async.prior_grid) async.prior_grid();
  for (Fiber* f : async.prior_waiting) make_ready(*f);
  async.prior_waiting.clear();
  achieved();
}
// griddepcontrol.wait
inline void pdl_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Fiber& f = *st.current;
  if (async.prior_running) {
    async.prior_waiting.push_back(&f);
    block_here("griddepcontrol.wait", file, line);
  }
  f.pdl_waited = true;
  point();
}
// griddepcontrol.launch_dependents: only a hint, the dependent still waits for the whole grid
inline void pdl_launch() { point(); }
inline void pdl_launch_dependents() { pdl_launch(); }
// True while this thread may touch nothing that the caller may have written.
inline bool before_pdl_wait() { return st.options.pdl && !st.current->pdl_waited; }

// ---- what the scheduler calls

inline bool complete_one_async() {
  if (!async.pending.empty()) {
    const size_t i = st.random.below(static_cast<uint32_t>(async.pending.size()));
    const AsyncCopy c = std::move(async.pending[i]);
    async.pending.erase(async.pending.begin() + static_cast<long>(i));
    do_copy(c);
    return true;
  }
  if (async.prior_running) {
    finish_prior_grid();
    return true;
  }
  return false;
}

inline void tick_async() {
  if (async.pending.empty() && !async.prior_running) return;
  if (st.latency == Latency::lazy) return;
  if (st.random.chance(st.latency == Latency::eager ? 256 : 8)) complete_one_async();
}

inline void forget_block(Block& b) {
  for (auto& f : b.fibers)
    for (auto& c : f.copies) do_deferred(c);  // harmless on the hardware too: the block's memory lives until they land
  for (auto& c : async.pending)
    if (c.dst_block == &b || (c.src_block == &b && !c.has_snapshot))
      fail("the block exits with a bulk copy under way" + describe_async());
  for (auto it = async.bars.begin(); it != async.bars.end();)
    it = it->second.block == &b ? async.bars.erase(it) : std::next(it);
  if (!CPU_ASAN)
    for (int i = 0; i < 64; ++i)
      if (b.smem[b.smem_size + static_cast<size_t>(i)] != 0xC3) fail("wrote past the end of shared memory");
  std::free(b.smem);
  b.smem = nullptr;
}

inline std::string describe_async() {
  std::string out;
  if (!async.pending.empty()) out += "\n  " + std::to_string(async.pending.size()) + " bulk copies under way";
  for (auto& [p, m] : async.bars) {
    out += "\n  mbarrier at byte " + std::to_string(reinterpret_cast<uint8_t*>(p) - m.block->smem) + " of block " +
           std::to_string(m.block->index.x) + ": phase " + std::to_string(m.phase) + ", " + std::to_string(m.pending) +
           " of " + std::to_string(m.expected) + " arrivals and " + std::to_string(m.tx) + " bytes missing";
    if (out.size() > 2000) return out;
  }
  return out;
}

inline void reset_async(bool pdl) {
  async.bars.clear();
  async.pending.clear();
  async.prior_waiting.clear();
  async.prior_running = pdl;
}
inline void drain_async() {
  while (complete_one_async()) {
  }
}

}  // namespace cpu
