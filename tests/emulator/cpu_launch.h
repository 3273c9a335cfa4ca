// Launches of the CUDA emulator: starts blocks and clusters, runs them to the end, says what went wrong.
#pragma once

#include "cpu_async.h"

namespace cpu {

inline void start_block(Block& b, Cluster& c, uint3 index, unsigned rank, size_t slot) {
  const unsigned threads = st.launch.block.x * st.launch.block.y * st.launch.block.z;
  b.index = index, b.cluster = &c, b.rank = rank, b.live = threads, b.started = false;
  b.first_stack = slot * threads;
  b.smem_size = st.launch.smem;
  // exactly the launch's size, so that red zones begin where the block's memory ends; garbage, so that nobody relies on
  // zeros
  b.smem = static_cast<uint8_t*>(std::malloc(b.smem_size + (CPU_ASAN ? 0 : 64)));
  st.random.fill(b.smem, b.smem_size);
  if (!CPU_ASAN) std::memset(b.smem + b.smem_size, 0xC3, 64);
  b.fibers.clear();
  b.fibers.resize(threads);
  b.warps.resize((threads + 31) / 32);
  // in half of the blocks all warps rank alike against other blocks, so that a block can be done before its peer begins
  const int64_t block_priority = static_cast<int64_t>(st.random.next() >> 34) << (st.random.chance(512) ? 30 : 0);
  for (auto& w : b.warps) w.live = w.ready = w.meetings_used = 0, w.position = -1;
  for (auto& bar : b.barriers) bar = Barrier{};
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = b.fibers[t];
    Warp& w = b.warps[t / 32];
    if (t % 32 == 0) {
      w.block = &b;
      w.fibers = &f;
      w.priority = block_priority + static_cast<int64_t>(st.random.next() >> 34);
    }
    f.warp = &w, f.lane = t % 32;
    f.tid = {t % st.launch.block.x, t / st.launch.block.x % st.launch.block.y,
             t / (st.launch.block.x * st.launch.block.y)};
    w.live |= 1u << f.lane;
    st.stacks.prepare(b.first_stack + t, f.ctx, fiber_entry);
  }
  if (st.random.chance(128))
    st.late.push_back({st.stats.switches + st.random.below(50'000), &b});
  else
    for (auto& w : b.warps) make_ready(w, w.live);
}

template <class T>
T drawn(int given, int count) {
  return static_cast<T>(given >= 0 ? given : static_cast<int>(st.random.below(static_cast<uint32_t>(count))));
}

// Runs a grid to its end. Returns an empty string, or what went wrong.
template <class F>
std::string launch(const Launch& l, F body) {
  const unsigned threads = l.block.x * l.block.y * l.block.z, blocks = l.grid.x * l.grid.y * l.grid.z;
  st.error.clear();
  if (blocks == 0 || threads == 0 || threads > 1024)
    return "invalid launch: " + std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads";
  if (l.smem > 232448) return "invalid launch: " + std::to_string(l.smem) + " bytes of shared memory";
  if (l.cluster < 1 || l.cluster > 16 || l.grid.x % l.cluster != 0)
    return "invalid launch: cluster of " + std::to_string(l.cluster) + " in a grid of " + std::to_string(l.grid.x);
  const auto& o = st.options;
  st.random.seed(o.seed);
  st.stats = Stats{};
  st.schedule = drawn<Schedule>(o.schedule, static_cast<int>(Schedule::count));
  st.latency = drawn<Latency>(o.latency, static_cast<int>(Latency::count));
  constexpr unsigned kChances[] = {0, 0, 16, 1024};
  const unsigned drawn_chance = kChances[st.random.below(4)];
  st.preempt = o.preempt >= 0 ? static_cast<unsigned>(o.preempt) : drawn_chance;
  st.lane_order = st.random.below(4);
  if (st.schedule == Schedule::in_order && st.lane_order > 1) st.lane_order = 1;
  const unsigned clusters = blocks / l.cluster;
  const unsigned wanted = o.resident > 0 ? static_cast<unsigned>(o.resident) : 1 + st.random.below(4);
  const unsigned resident = std::max(1u, std::min(wanted, clusters));
  st.launch = l;
  st.body = body;
  st.ready.clear(), st.stalled.clear(), st.late.clear();
  st.spins = st.releases = 0, st.lowest_priority = 0, st.spinning = false, st.last_warp = nullptr;
  blockDim = l.block, gridDim = l.grid;
  reset_async(o.pdl);
  for (auto& b : st.blocks) std::free(b->smem), b->smem = nullptr;
  st.blocks.clear(), st.slots.clear();
  for (unsigned i = 0; i < resident; ++i) {
    st.slots.push_back(std::make_unique<Cluster>());
    for (unsigned r = 0; r < l.cluster; ++r) {
      st.blocks.push_back(std::make_unique<Block>());
      st.slots.back()->blocks.push_back(st.blocks.back().get());
    }
  }
  std::vector<unsigned> order(clusters);
  for (unsigned i = 0; i < clusters; ++i) order[i] = i;
  if (st.random.chance(512))  // the hardware promises no order of blocks
    for (unsigned i = clusters; i > 1; --i) std::swap(order[i - 1], order[st.random.below(i)]);
  for (unsigned started = 0;;) {
    bool any = false;
    for (size_t s = 0; s < st.slots.size(); ++s) {
      Cluster& c = *st.slots[s];
      if (c.live == 0 && started < clusters) {
        const unsigned first = order[started++] * l.cluster;
        auto members = c.blocks;
        c = Cluster{};
        c.blocks = members;
        c.live = threads * l.cluster;
        for (unsigned r = 0; r < l.cluster; ++r) {
          const unsigned id = first + r;
          start_block(*c.blocks[r], c, {id % l.grid.x, id / l.grid.x % l.grid.y, id / (l.grid.x * l.grid.y)}, r,
                      s * l.cluster + r);
        }
      }
      any |= c.live != 0;
    }
    if (!any) break;
    st.finished_block = false;
    Fiber* f = pick();
    if (f == nullptr) {
      st.error = "deadlock: no thread can run:" + describe_waits();
      break;
    }
    if (!st.error.empty()) break;
    if (++st.stats.switches > o.max_switches) {
      st.error = "gave up after " + std::to_string(o.max_switches) + " switches:" + describe_waits();
      break;
    }
    st.current = f, threadIdx = f->tid, blockIdx = f->warp->block->index;
    switch_context(st.main, f->ctx);
    st.current = nullptr;
    if (!st.error.empty()) break;
  }
  if (st.error.empty()) drain_async();
  for (auto& b : st.blocks) std::free(b->smem), b->smem = nullptr;
  return st.error;
}

}  // namespace cpu
