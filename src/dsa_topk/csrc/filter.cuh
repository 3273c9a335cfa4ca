// The fast path: sample -> bracket -> one filtered pass -> exact choice among the survivors -> ordered emission.
//
//  1. A sample of the row, the same in every block of it, gives a bracket [lo, hi] which holds the k-th score almost
//  surely
//     (sample.cuh).
//  2. Each block streams its slice once. A score above hi is selected for sure: one bit in a shared-memory bitmap. A
//  score
//     inside the bracket is a candidate: (value, position) to a list of its own thread (stream.cuh).
//  3. Counts say whether the bracket held; the candidates are ranked exactly and the chosen ones set their bits
//  (choose.cuh).
//  4. The bitmap is expanded in order: ascending positions, no sort, no atomics on the output (emit.cuh).
// Where the sample shows one heavy value at the k-th place its copies go to a second bitmap instead of lists
// (plateau.cuh).
//
// Thresholds need not be scores: whatever the bracket, the counts are exact, so a miss costs one more pass beside the
// known side, and a second one a counting pass that closes in on the k-th key and a last pass (retry.cuh). Nothing is
// ever truncated.
//
// A row is one block, or (kMulti) one cluster of a.cluster blocks, each owning a slice. Candidates and counts travel
// once over distributed shared memory; every block then decides the same, redundantly.
#pragma once
#include "retry.cuh"

namespace dsa {

// Asks for the first bytes of the slice, so that they are in L2 when the sample has told the bracket.
template <class E>
__device__ __forceinline__ void prefetch_head(const Args& a, const Row<E>& row, const Slice& slice) {
  constexpr int32_t kSize = sizeof(typename E::Bits), kSixteen = 16 / kSize;
  // Whole 16-byte units that lie inside the window: from the second unit of the slice on.
  const int32_t first = (slice.first + E::kLoad) * 32 - slice.shift, end = slice.last * 32 - slice.shift;
  const int32_t count = ((end < row.n ? end : row.n) - first) & ~(kSixteen - 1);
  const int32_t bytes = count * kSize < a.prefetch ? count * kSize : a.prefetch;
  if (bytes > 0) ptx::prefetch_l2(row.window + first, static_cast<uint32_t>(bytes));
}

// The fast path of a row; returns the step that finishes it where this could not.
template <class C>
__device__ __forceinline__ uint32_t fast_row(const Args& a) {
  using E = typename C::E;
  constexpr bool kMulti = C::kMulti;
  const Place<C> at(a);
  auto& s = at.s;
  const Row<E> row = at.row();
  if (row.n <= a.k) {
    count_path<C>(a, at.rank, kTrivial);
    Output<E>(a, row, at.index)
        .put_all(static_cast<int32_t>(at.rank * C::kThreads + threadIdx.x), at.blocks * C::kThreads);
    if (kMulti) ptx::cluster_wait();
    return step(kDone);
  }
  // The same answer in every block of the row.
  if (row.n < kMinSampled || slice_words(row, at.blocks) > a.bitmap_words) {
    if (kMulti) ptx::cluster_wait();
    return step(kExactly);
  }
  const Slice slice = at.slice(row);
  at.note(row);
  if (threadIdx.x == 0) prefetch_head(a, row, slice);
  const Bracket b = sample_bracket<C>(a, row, slice.shift, s, sample_place<C>(a));
  if (kMulti) ptx::cluster_wait();
  if (b.sight != kClear) return step(kCloser);
  Candidates<C> candidates(a, s, at.arena);
  const Tester<C> test(b.lo, b.hi);
  const int entries = stream_filter<C>(row, slice, test, at.bitmap, candidates);
  candidates.set_bracket(test.low(), test.high());
  Bracket bins;  // found only now: registers are short while a slice streams
  bins.lo = test.low();
  bins.hi = test.high();
  bins.set_bins(s.bottom, s.top);
  const float top = bins.bin_hi, scale = histogram_scale<C::kBins>(bins.bin_lo, top);
  const Tally t = tally<C>(a, s, candidates, entries, top, scale, at.rank, at.bitmap, slice.last - slice.first);
  if (!t.holds()) return missed<C>(s, t, kRetry);
  count_path<C>(a, at.rank, kFast);
  Taker<C> take{at.bitmap, slice.first, slice.last, 0};
  if (t.need > 0) {
    const Found crossing = crossing_bin<C>(candidates, entries, top, scale, t.need);
    if (crossing.count > kTieCap) return crowded<C>(s, t, crossing, top, scale, entries);
    take_ranked<C>(a, candidates, entries, top, scale, crossing, t.need - crossing.above, take);
  }
  return ask_emission<C>(s, t.lower, take.lower);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) filter_kernel(const __grid_constant__ Args a) {
  ptx::pdl_launch_dependents();
  if (C::kMulti) ptx::cluster_arrive();  // waited for before the first access to a peer's memory
  ptx::pdl_wait();
  uint32_t next = fast_row<C>(a);
  if (next != step(kEmit)) next = take_steps<C>(a, next);
  if (next == step(kEmit)) emit_row<C>(a);
}

}  // namespace dsa
