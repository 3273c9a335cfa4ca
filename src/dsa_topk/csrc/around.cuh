// One pass for a bracket around a heavy value: the other scores in it are candidates as ever, and its copies, which no
// list has room for, go to a second bitmap. Whether the k-th score is the heavy value or lies on either side of it, the
// pass settles the row: beside a plateau the sample cannot say which.
//
// For 32-bit scores in rows of one block; others, and rows without room, take one pass for each side (retry.cuh).
#pragma once
#include "plateau.cuh"
#include "steps.cuh"

namespace dsa {

constexpr int kAroundBatch = 4;  // scores a thread tests before it looks at its list; the list's slack beyond is free

template <class C>
constexpr bool kHasAround = C::E::kLoad == 1 && !C::kMulti && (C::kSlack > kAroundBatch);

// The second bitmap lies behind what the lists need.
template <class C>
__device__ __forceinline__ uint32_t* second_bitmap(uint8_t* arena) {
  return reinterpret_cast<uint32_t*>(arena + (C::kList + kAroundBatch) * C::kThreads * 8);
}

template <class C>
__device__ __forceinline__ bool around_fits(const Row<typename C::E>& row) {
  return kHasAround<C> && slice_words(row, 1) * 4 <= (C::kSlack - kAroundBatch) * C::kThreads * 8;
}

// As Tester. The copies' words lie `behind` those of the winners.
template <class C>
struct AroundTester {
  float lo, hi, value;
  int32_t behind;

  __device__ __forceinline__ void one(uint32_t x, uint32_t place, uint32_t& cursor, uint32_t* words, bool store) const {
    uint32_t copies;
    const uint32_t ballot =
        ptx::filter_step_around<C::kThreads * 8>(__uint_as_float(x), lo, hi, value, place, cursor, copies);
    if (store) {
      words[0] = ballot;
      words[behind] = copies;
    }
  }
  template <int kFirst>
  __device__ __forceinline__ void four(const uint32_t* x, uint32_t place, uint32_t& cursor, uint32_t* words, int stored,
                                       uint32_t&) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Looked at when it is needed: predicates are short.
      one(x[i], place + i * C::kThreads, cursor, words + i * C::kWarps, i < ptx::opaque_number(stored));
    }
  }
};

template <class C>
__device__ __forceinline__ uint32_t around_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  auto& s = at.s;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  __syncthreads();  // what the step before noted was written; this is the row's first pass: nothing was counted yet
  Candidates<C> candidates(a, s, at.arena);
  uint32_t* copies = second_bitmap<C>(at.arena);
  int32_t words;
  int entries;
  {
    const auto row = at.noted();
    const Slice slice = at.slice(row);
    words = slice.last - slice.first;
    const AroundTester<C> test{s.lo, s.hi, float_of(s.heavy), static_cast<int32_t>(copies - at.bitmap)};
    entries = stream_filter<C, kAroundBatch>(row, slice, test, at.bitmap, candidates);
  }
  const float top = s.bin_hi, scale = histogram_scale<C::kBins>(s.bin_lo, top);
  const float value = float_of(s.heavy);
  uint32_t above = 0;
  const Tally t = tally<C>(a, s, candidates, entries, top, scale, 0, at.bitmap, words,
                           [&](const Entry& e) { above += __uint_as_float(e.value) > value; });
  if (t.full) return missed<C>(s, t, kSettle);
  // Candidates above the value, and its copies: those of each warp's words, so that they are also prefixes.
  const int32_t per_warp = (words + C::kWarps - 1) / C::kWarps, begin = warp * per_warp,
                end = words < begin + per_warp ? words : begin + per_warp;
  uint32_t count = 0;
#pragma unroll 2
  for (int32_t i = begin + lane; i < end; i += 32) count += __popc(copies[i]);
  above = __reduce_add_sync(ptx::kFullMask, above);
  count = __reduce_add_sync(ptx::kFullMask, count);
  auto* warp_above = reinterpret_cast<uint32_t*>(s.heads);  // nobody reads the words of the tally any more there
  if (lane == 0) {
    warp_above[warp] = above;
    s.wa[warp] = count;
  }
  __syncthreads();
  above = warp_sum_first(warp_above, C::kWarps, lane);
  const uint32_t all = warp_sum_first(s.wa, C::kWarps, lane), before = warp_sum_first(s.wa, warp, lane);
  // Of the copies as many as there is room for behind the better candidates; of the candidates the rest.
  const int32_t room = t.need - static_cast<int32_t>(above);
  const uint32_t ties = room <= 0 ? 0u : static_cast<uint32_t>(room) < all ? static_cast<uint32_t>(room) : all;
  const int32_t need = t.need - static_cast<int32_t>(ties);
  if (need < 0 || need > static_cast<int32_t>(t.entries)) return missed<C>(s, t, kSecond);
  if (ties != 0) take_ties(at.bitmap, copies, begin, end, before, a.largest ? all - ties : 0u, a.largest ? all : ties);
  if (tid == 0) {
    s.path = ties != 0 && ties < all ? kPlateau : kFast;
    s.crowd = Crowd{top, scale, 0, need, 0u};
  }
  return step(kChoose, entries);
}

}  // namespace dsa
