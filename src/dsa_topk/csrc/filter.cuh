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

// Not for 16-bit scores, which wait for instructions and barriers and not for memory, nor for the shortest rows, which
// are over too soon.
template <class C>
constexpr bool kLooksAhead = !C::kMulti && C::E::kLoad == 1 && C::kThreads * C::kSamples > 1024;

// Whether the block whose place this one has taken asked for the row's head and sample.
template <class C>
__device__ __forceinline__ bool asked_before(const Args& a) {
  return kLooksAhead<C> && a.prefetch > 0 && static_cast<int32_t>(blockIdx.x) >= a.ahead;
}

// Finds the row that will take this one's place, by one thread while the sample is on its way.
template <class C>
__device__ __forceinline__ void note_next(const Args& a, const Place<C>& at) {
  at.s.next_n = 0;
  if (a.prefetch <= 0 || at.index < a.ahead) return;
  const Row<typename C::E> next(a, at.index - a.ahead);
  at.s.next_n = next.n > a.k ? next.n : 0;
  at.s.next_window = reinterpret_cast<uint64_t>(next.window);
}

// Asks for its sample and its head, while this row's results are put together.
template <class C>
__device__ __forceinline__ void prefetch_next(const Args& a, const Place<C>& at) {
  using E = typename C::E;
  const int32_t n = at.s.next_n;
  if (n < kMinSampled) return;
  const Row<E> next(reinterpret_cast<const typename E::Bits*>(at.s.next_window), n, 0);
  using Pieces = SamplePieces<C>;
  static_assert(Pieces::kAll <= C::kThreads, "one a thread");
  if (threadIdx.x < Pieces::kAll) {
    const int32_t quarter = Pieces::quarter(n);
    ptx::prefetch_piece(next.window + Pieces::start(threadIdx.x >> 2, quarter, row_shift(next)) +
                        static_cast<int32_t>(threadIdx.x & 3u) * quarter);
  }
  if (threadIdx.x == 0) prefetch_head(next, at.slice(next), a.prefetch);
}

// The fast path of a row; returns the step that finishes it where this could not.
template <class C>
__device__ __forceinline__ uint32_t fast_row(const Args& a) {
  using E = typename C::E;
  constexpr bool kMulti = C::kMulti;
  const Place<C> at(a);
  auto& s = at.s;
  if (threadIdx.x < 32) at.note(at.row());  // by one warp: it takes a hundred instructions
  __syncthreads();
  const Row<E> row = at.noted();
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
  const Bracket b = sample_bracket<C>(a, row, row_shift(row), s, sample_place<C>(a), [&](bool late) {
    if (threadIdx.x != 0) return;
    if (late == (a.prefetch < 0) && !asked_before<C>(a)) prefetch_head(row, at.slice(row), a.prefetch);
    if (kLooksAhead<C> && !late) note_next<C>(a, at);
  });
  if (kMulti) ptx::cluster_wait();
  if (b.sight != kClear) return step(kCloser);
  Candidates<C> candidates(a, s, at.arena);
  const Tester<C> test(b.lo, b.hi);
  const Slice streamed = at.slice(row);
  const int entries = stream_filter<C>(row, streamed, test, at.bitmap, candidates);
  if (kLooksAhead<C>) prefetch_next<C>(a, at);
  // Registers are short while a slice streams, for 16-bit scores too short to keep this.
  const Slice slice = E::kLoad == 1 ? streamed : at.slice(at.noted());
  candidates.set_bracket(test.low(), test.high());
  Bracket bins;  // found only now: registers are short while a slice streams
  bins.lo = test.low();
  bins.hi = test.high();
  bins.set_bins(s.bottom, s.top);
  const float top = bins.bin_hi, scale = histogram_scale<C::kBins>(bins.bin_lo, top);
  const Tally t = tally<C>(a, s, candidates, entries, top, scale, at.rank, at.bitmap, slice.last - slice.first);
  if (!t.holds()) return missed<C>(s, t, kRetry);
  Found crossing{0, 0, 0, 0};
  if (t.need > 0) crossing = crossing_bin<C>(candidates, entries, top, scale, t.need);
  if (kMayLack<C> && crossing.bin < 0) return missed_below<C>(s, kRetry);
  count_path<C>(a, at.rank, kFast);
  if (crossing.count > kTieCap) return crowded<C>(s, t, crossing, top, scale, entries);
  Taker<C> take{at.bitmap, slice.first, slice.last, 0};
  if (t.need > 0) take_best<C>(a, candidates, entries, top, scale, crossing, t.need - crossing.above, take);
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
