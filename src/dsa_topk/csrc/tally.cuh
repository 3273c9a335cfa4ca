// The row's counts after a pass: did the bracket hold?
#pragma once
#include "choose.cuh"
#include "stream.cuh"

namespace dsa {

constexpr uint32_t kFull = 0x80000000u;  // in BlockCounts::more: counted, but they did not fit

// What a block knows after its counts met those of the row's other blocks.
struct Tally {
  int32_t need;      // candidates still to take; negative: more than k scores above the bracket
  uint32_t entries;  // candidates of the row; where bins are exact (config.cuh) entries, of one or two
  uint32_t most;     // no fewer than the candidates
  uint32_t lower;    // sure winners in the blocks before this one
  bool full;         // a list overflowed somewhere in the row

  __device__ __forceinline__ bool holds() const { return !full && need >= 0 && need <= static_cast<int32_t>(most); }
  __device__ __forceinline__ Miss miss() const {
    return need < 0 ? kTooLow : need > static_cast<int32_t>(most) ? kTooHigh : kFullList;
  }
  __device__ __forceinline__ float share() const {  // of the candidates that are to be taken
    return __fdividef(static_cast<float>(need), static_cast<float>(entries));
  }
};

// Counts sure winners and candidates of the row, and the candidates by bin: at once where they are all this block's;
// with kMulti they go to all blocks of the row first, and crossing_bin counts them. Calls also(e) for each of this
// block's candidates where it counts it (not with kMulti, nor for exact bins).
struct Nothing {
  __device__ __forceinline__ void operator()(const Entry&) const {}
};
template <class C, class F = Nothing>
__device__ __forceinline__ Tally tally(const Args& a, FilterShared<C::kBins>& s, const Candidates<C>& lists,
                                       int entries, float top, float scale, uint32_t rank, const uint32_t* bitmap,
                                       int32_t words, F also = F()) {
  constexpr int kThreads = C::kThreads;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint32_t inclusive = 0, found = 0;
  if (C::kMulti) {
    inclusive = warp_inclusive_sum(static_cast<uint32_t>(entries), lane);
    if (lane == 31) s.wc[warp] = inclusive;
  } else if (lists.exact) {
    lists.each_own_entry(entries, [&](const Entry& e) { lists.count_pair(e); });
    found = static_cast<uint32_t>(entries);
  } else {
    lists.each_own(entries, [&](const Entry& e) {
      count_in_bin<C>(s, e, top, scale);
      also(e);
      ++found;
    });
  }
  __syncthreads();  // bitmap and spill list are complete too
  const uint32_t sure = __reduce_add_sync(ptx::kFullMask, count_bits<kThreads>(bitmap, words));
  if (lane == 0) s.wb[warp] = sure;
  const uint32_t spilled = s.spill_count;
  Tally t;
  if (C::kMulti) {
    const uint32_t listed = warp_sum_first(s.wc, C::kWarps, lane), mine = listed + spilled;
    const bool fits = spilled <= C::kSpill && mine <= static_cast<uint32_t>(a.region_cap);
    if (fits) {
      const uint32_t slot = warp_sum_first(s.wc, warp, lane) + inclusive - entries;
      for (int32_t r = 0; r < a.cluster; ++r) {
        Entry* to = ptx::map_shared(lists.regions, r) + rank * a.region_cap;
        for (int i = 0; i < entries; ++i) to[slot + i] = lists.own[i * kThreads];
        for (uint32_t i = tid; i < spilled; i += kThreads) to[listed + i] = lists.spill[i];
      }
      lists.each_own(entries, [&](const Entry&) { ++found; });
      lists.each_spilled([&](const Entry&) { ++found; });
    }
    found = __reduce_add_sync(ptx::kFullMask, found);
    if (lane == 0) s.wa[warp] = found;
    __syncthreads();
    const uint32_t block_sure = warp_sum_first(s.wb, C::kWarps, lane);
    found = fits ? warp_sum_first(s.wa, C::kWarps, lane) : mine;
    if (tid < a.cluster)
      ptx::map_shared(s.heads, tid)[rank] = BlockCounts{block_sure, fits ? mine : mine | kFull, found};
    ptx::row_sync<true>();
    uint32_t all = 0;
    t = Tally{0, 0, 0, 0, false};
    for (int32_t r = 0; r < a.cluster; ++r) {
      const BlockCounts h = s.heads[r];
      if (r == static_cast<int32_t>(rank)) t.lower = all;
      all += h.selected;
      t.full = t.full || (h.more & kFull);
      t.entries += h.found;
    }
    t.most = t.entries;
    t.need = a.k - static_cast<int32_t>(all);
  } else {
    t.full = spilled > C::kSpill;
    if (!t.full && lists.exact) {
      lists.each_spilled_entry([&](const Entry& e) {
        lists.count_pair(e);
        ++found;
      });
    } else if (!t.full) {
      lists.each_spilled([&](const Entry& e) {
        count_in_bin<C>(s, e, top, scale);
        also(e);
        ++found;
      });
    }
    found = __reduce_add_sync(ptx::kFullMask, found);
    if (lane == 0) s.wc[warp] = found;
    __syncthreads();
    t.need = a.k - static_cast<int32_t>(warp_sum_first(s.wb, C::kWarps, lane));
    t.entries = warp_sum_first(s.wc, C::kWarps, lane) + (t.full ? spilled : 0u);
    t.most = lists.exact ? 2u * t.entries : t.entries;
    t.lower = 0;
  }
  return t;
}

}  // namespace dsa
