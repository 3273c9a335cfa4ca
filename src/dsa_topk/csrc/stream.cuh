// One pass over a block's slice: sure winners to the bitmap, candidates to the lists.
#pragma once
#include "config.cuh"

namespace dsa {

// One pass over the block's words: bits above hi to the bitmap, candidates to the lists. Returns this thread's entries.
//
// Loads run 8 to 16 words ahead of the tests, in two register sets that take turns: what is being tested is never
// copied, and an SM has some 50 KB under way, which is what the latency of a busy memory asks for.
template <class C, int kBatch = C::kBatch>
__device__ __forceinline__ int stream_filter(const Row<typename C::E>& row, const Slice& slice, float lo, float hi,
                                             uint32_t* bitmap, const Candidates<C>& lists) {
  constexpr int kThreads = C::kThreads, kWarps = C::kWarps, kStep = C::kThreads * 8;
  using E = typename C::E;
  using Bits = typename E::Bits;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const uint32_t start = ptx::smem_address(lists.own);
  const uint32_t full = start + C::kList * kStep;
  uint32_t cursor = start;
  const auto spill = [&]() {
    if (__any_sync(ptx::kFullMask, cursor > full)) {
#pragma unroll 1
      while (cursor > full) {
        cursor -= kStep;
        const uint32_t slot = atomicAdd(&lists.s.spill_count, 1u);
        if (slot < C::kSpill) lists.spill[slot] = lists.own[(cursor - start) / 8];
      }
      __syncwarp();  // one lane's detour must not leave the warp diverged through the ballots that follow
    }
  };
  // Words that lie wholly inside the window; the partial ones at its ends are done at the end, score by score.
  const int32_t head = slice.shift ? 1 : 0, tail = (slice.shift + row.n) >> 5;
  const int32_t first = slice.first > head ? slice.first : head, last = slice.last < tail ? slice.last : tail;
  int32_t left = last - first > warp ? (last - first - warp + kWarps - 1) / kWarps : 0;  // full words of this warp
  const Bits* at = row.window + (static_cast<int64_t>(first + warp) * 32 + lane - slice.shift);
  uint32_t* bits = bitmap + (first + warp - slice.first);
  uint32_t tag = static_cast<uint32_t>(first + warp) * 32u + lane;

  Bits x[kBatch], y[kBatch];
  // Loads the batch that lies `ahead` words in front; NaN, which passes no test, where the warp's words end.
  const auto load = [&](Bits(&v)[kBatch], int ahead) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) v[u] = ahead + u < left ? ptx::ld_stream(at + (ahead + u) * kThreads) : E::kNaN;
  };
  const auto filter = [&](const Bits(&v)[kBatch], bool whole) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const uint32_t ballot = ptx::filter_step<kStep>(E::value(v[u]), lo, hi, tag + u * kThreads, cursor);
      if (lane == 0 && (whole || u < left)) bits[u * kWarps] = ballot;
    }
    spill();
    at += kBatch * kThreads;
    bits += kBatch * kWarps;
    tag += kBatch * kThreads;
    left -= kBatch;
  };
  const auto reload = [&](Bits(&v)[kBatch]) {  // the batch after the next one
    if (left >= 2 * kBatch) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) v[u] = ptx::ld_stream(at + (kBatch + u) * kThreads);
    } else {
      load(v, kBatch);
    }
  };
  load(x, 0);
  load(y, kBatch);
  bool partial_in_y = false;
#pragma unroll 1
  while (left >= kBatch) {
    filter(x, true);
    reload(x);
    partial_in_y = left < kBatch;
    if (partial_in_y) break;
    filter(y, true);
    reload(y);
  }
  if (left > 0) {
    if (partial_in_y) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) x[u] = y[u];
    }
    filter(x, false);
  }
  // The partial first and last words of the row.
  const int32_t total_words = (slice.shift + row.n + 31) >> 5;
  const auto edge = [&](int32_t word) {
    const int32_t p = word * 32 + lane - slice.shift;
    const Bits v = p >= 0 && p < row.n ? ptx::ld_stream(row.window + p) : E::kNaN;
    const uint32_t ballot =
        ptx::filter_step<kStep>(E::value(v), lo, hi, static_cast<uint32_t>(word) * 32u + lane, cursor);
    if (lane == 0) bitmap[word - slice.first] = ballot;
  };
  if (warp == 0 && head == 1 && slice.first == 0 && slice.last > 0) edge(0);
  if (warp == kWarps - 1 && tail < total_words && slice.last == total_words && slice.first < total_words) edge(tail);
  spill();
  return static_cast<int>((cursor - start) / kStep);
}

// Number of set bits of this thread's share of the block's bitmap.
template <int kThreads>
__device__ __forceinline__ uint32_t count_bits(const uint32_t* bitmap, int32_t words) {
  uint32_t sum = 0;
#pragma unroll 2
  for (int32_t i = threadIdx.x; i < words; i += kThreads) sum += __popc(bitmap[i]);
  return sum;
}

}  // namespace dsa
