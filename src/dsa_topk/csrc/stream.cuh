// One pass over a block's slice: sure winners to the bitmap, candidates to the lists.
#pragma once
#include "config.cuh"

namespace dsa {

// A number as a type: an argument that is a constant.
template <int kN>
struct Number {
  static constexpr int value = kN;
};

// One pass over the block's words: bits above hi to the bitmap, candidates to the lists. Returns this thread's entries.
//
// Loads run 8 to 16 units ahead of the tests, in two register sets that take turns: what is being tested is never
// copied, and an SM has some 50 KB under way, which is what the latency of a busy memory asks for.
template <class C, int kBatch = C::kBatch, class Test>
__device__ __forceinline__ int stream_filter(const Row<typename C::E>& row, const Slice& slice, const Test& test,
                                             uint32_t* bitmap, const Candidates<C>& lists) {
  using E = typename C::E;
  constexpr int kThreads = C::kThreads, kWarps = C::kWarps, kStep = C::kThreads * 8, kLoad = E::kLoad;
  constexpr int kUnit = 32 * kLoad;  // places of a unit
  static_assert(kBatch == 4 || kBatch == 8, "four loads are tested together");
  constexpr int kCheck = kBatch < C::kSlack ? kBatch : C::kSlack;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const uint32_t start = ptx::smem_address(lists.own);
  const uint32_t full = start + C::kList * kStep;
  uint32_t cursor = start;
  const auto spill = [&]() {
    if (__any_sync(ptx::kFullMask, cursor > full)) {
#pragma unroll 1
      while (cursor > full) {
        cursor -= kStep;
        const uint32_t slot = ptx::add_one_to(&lists.s.spill_count);
        if (slot < C::kSpill) lists.spill[slot] = lists.own[(cursor - start) / 8];
      }
      __syncwarp();  // one lane's detour must not leave the warp diverged through the ballots that follow
    }
  };
  // Units that lie wholly inside the window; the partial ones at its ends are done at the end, score by score.
  const int32_t head = slice.shift ? 1 : 0, tail = (slice.shift + row.n) / kUnit;
  const int32_t begin = slice.first / kLoad, end = slice.last / kLoad;
  const int32_t first = begin > head ? begin : head, last = end < tail ? end : tail;
  int32_t left = last - first > warp ? (last - first - warp + kWarps - 1) / kWarps : 0;  // full units of this warp
  const auto* at = reinterpret_cast<const uint32_t*>(
      row.window + (static_cast<int64_t>(first + warp) * kUnit + lane * kLoad - slice.shift));
  uint32_t* words = bitmap + (first + warp - begin) * kLoad;
  uint32_t place = static_cast<uint32_t>((first + warp) * kUnit + lane * kLoad);

  uint32_t x[kBatch], y[kBatch];
  // Loads the batch that lies `ahead` units in front; NaN, which passes no test, where the warp's units end.
  const auto load = [&](uint32_t (&v)[kBatch], int ahead) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) v[u] = ahead + u < left ? ptx::ld_stream(at + (ahead + u) * kThreads) : E::kNaNs;
  };
  uint32_t marks = 0;  // of 16-bit scores (tester.cuh), in groups of two batches
  const auto filter = [&](const uint32_t (&v)[kBatch], auto second, bool whole) {
    constexpr int kFirst = decltype(second)::value ? kBatch : 0;
    const auto part = [&](auto u) {
      constexpr int kU = decltype(u)::value;
      test.template four<kFirst + kU>(v + kU, place + kU * kThreads * kLoad, cursor, words + kU * kWarps * kLoad,
                                      lane == 0 ? (whole ? 4 : left - kU) : 0, marks);
      if ((kU + 4) % kCheck == 0) spill();
    };
    part(Number<0>());
    if constexpr (kBatch == 8) part(Number<4>());
    at += kBatch * kThreads;
    words += kBatch * kWarps * kLoad;
    place += kBatch * kThreads * kLoad;
    left -= kBatch;
  };
  // Ends a group of `units` units, the first of which has the words at `to`.
  const auto flush = [&](uint32_t* to, int units) {
    if constexpr (kLoad == 2) {
      const uint32_t word = words_of_marks(marks, lane);
      marks = 0;
      if ((lane & 15) < units) to[(lane & 15) * kWarps * 2 + (lane >> 4)] = word;
    }
  };
  const auto reload = [&](uint32_t (&v)[kBatch]) {  // the batch after the next one
    if (left >= 2 * kBatch) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) v[u] = ptx::ld_stream(at + (kBatch + u) * kThreads);
    } else {
      load(v, kBatch);
    }
  };
  load(x, 0);
  load(y, kBatch);
  const Number<0> first_batch;
  const Number<1> second_batch;
  bool partial_in_y = false;
#pragma unroll 1
  while (left >= kBatch) {
    filter(x, first_batch, true);
    reload(x);
    partial_in_y = left < kBatch;
    if (partial_in_y) break;
    filter(y, second_batch, true);
    reload(y);
    flush(words - 2 * kBatch * kWarps * kLoad, 2 * kBatch);
  }
  const int32_t whole = partial_in_y ? kBatch : 0, ending = whole + (left > 0 ? left : 0);
  uint32_t* group = words - whole * kWarps * kLoad;
  if (left > 0) {
    const uint32_t before = marks;  // of the group's first loads, or none
    marks = 0;
    if (partial_in_y) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) x[u] = y[u];
    }
    filter(x, first_batch, false);
    marks = before | marks << (partial_in_y ? kBatch == 8 ? 1 : 8 : 0);  // mark_of(load + kBatch)
  }
  if (ending > 0) flush(group, ending);
  // The partial first and last units of the row.
  const auto edge = [&](int32_t unit) {
    uint32_t v = E::kNaNs;
    const int32_t p = unit * kUnit + lane * kLoad - slice.shift;
#pragma unroll
    for (int i = 0; i < kLoad; ++i) {
      if (p + i >= 0 && p + i < row.n) {
        const uint32_t bits = ptx::ld_stream(row.window + p + i);
        v = kLoad == 1 ? bits : i == 0 ? (v & 0xffff0000u) | bits : (v & 0xffffu) | bits << 16;
      }
    }
    test.one(v, static_cast<uint32_t>(unit * kUnit + lane * kLoad), cursor, bitmap + (unit - begin) * kLoad, lane == 0);
  };
  const int32_t units = (slice.shift + row.n + kUnit - 1) / kUnit;
  if (warp == 0 && head == 1 && begin == 0 && end > 0) edge(0);
  if (warp == kWarps - 1 && tail < units && end == units && begin < units) edge(tail);
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
