// What happens to the rare rows: plateaus, missed brackets, full lists, crowded bins. Each function here finishes the
// row.
//
// They are out of line and never return to work in progress, so that the fast path keeps no registers for them.
#pragma once
#include "closer.cuh"
#include "count.cuh"
#include "emit.cuh"
#include "exact.cuh"
#include "plateau.cuh"
#include "tally.cuh"

namespace dsa {

template <class C>
__device__ __forceinline__ uint32_t block_rank() {
  return C::kMulti ? ptx::cluster_rank() : 0u;
}

// Causal prefill has its longest rows last: they go first.
template <class C>
__device__ __forceinline__ int32_t row_index(const Args& a) {
  return C::kMulti ? static_cast<int32_t>(blockIdx.x / static_cast<uint32_t>(a.cluster))
                   : a.rows - 1 - static_cast<int32_t>(blockIdx.x);
}

template <class C>
__device__ __forceinline__ void count_path(const Args& a, uint32_t rank, Path p) {
  if (a.counters && rank == 0 && threadIdx.x == 0) atomicAdd(a.counters + p, 1u);
}

// All bits are set (a barrier is still due): adds up what this row's earlier blocks chose among the candidates, and
// emits.
template <class C>
__device__ __forceinline__ void finish_row(const Args& a, int64_t index, const Row<typename C::E>& row,
                                           const Slice& slice, FilterShared<C::kBins>& s, uint8_t* arena,
                                           uint32_t* bitmap, uint32_t lower, uint32_t chosen_lower) {
  if (C::kMulti) {
    chosen_lower = __reduce_add_sync(ptx::kFullMask, chosen_lower);
    if ((threadIdx.x & 31) == 0) s.wb[threadIdx.x >> 5] = chosen_lower;
  }
  __syncthreads();
  if (C::kMulti) lower += warp_sum_first(s.wb, C::kWarps, threadIdx.x & 31);
  emit_bitmap<C::kThreads>(Output<typename C::E>(a, row, index), slice, bitmap, reinterpret_cast<uint16_t*>(arena),
                           s.wc, static_cast<int32_t>(lower));
}

// Finishes a row whose crossing bin is crowded.
template <class C>
__device__ __noinline__ void crowded_row(const Args& a, int entries, float top, float scale, int32_t bin, int32_t need,
                                         uint32_t lower) {
  const uint32_t rank = block_rank<C>();
  const int32_t index = row_index<C>(a);
  auto& s = *reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem());
  uint8_t* arena = ptx::dynamic_smem() + sizeof(s);
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(arena + a.arena_bytes);
  const Row<typename C::E> row(a, index);
  const Slice slice = slice_of(row, C::kMulti ? a.cluster : 1, rank);
  const Candidates<C> candidates(a, s, arena);
  Taker<C> take{bitmap, slice.first, slice.last, 0};
  take_crowded<C>(a, candidates, entries, top, scale, bin, need, take);
  finish_row<C>(a, index, row, slice, s, arena, bitmap, lower, take.lower);
}

// Moves the bracket to the side where the k-th score must be, above `key` or below it: what is left of it on that side,
// else as much again (a miss is a near miss). False: no floats are left there.
__device__ __forceinline__ bool move_bracket(Bracket& b, float bottom, float top, uint32_t key, bool above) {
  const float width = (b.hi < kHuge ? b.hi : top) - (b.lo > -kHuge ? b.lo : bottom);
  if (above) {
    if (key >= kKeyPlusInf) return false;
    b.lo = float_of(key_above(key));
    if (!(b.hi > b.lo)) b.hi = b.lo + width > b.lo ? b.lo + width : INFINITY;
  } else {
    if (key <= kKeyMinusInf) return false;
    b.hi = float_of(key_below(key));
    if (!(b.lo < b.hi)) b.lo = b.hi - width < b.hi ? b.hi - width : -INFINITY;
  }
  b.set_bins(bottom, top);
  return true;
}

// Narrows a bracket whose candidates did not fit to the part where their counts put the k-th score: `share` of them lie
// above it. Scores are spread smoothly over so small a range, or a heavy value is among them and nothing helps.
__device__ __forceinline__ void narrow_bracket(Bracket& b, float bottom, float top, float share) {
  const float width = b.bin_hi - b.bin_lo, at = b.bin_hi - share * width;
  if (at + 0.2f * width < b.hi) b.hi = at + 0.2f * width;
  if (at - 0.2f * width > b.lo) b.lo = at - 0.2f * width;
  b.set_bins(bottom, top);
}

// A plateau pass of the value with this key: finishes the row if that is its k-th score (0), else says whether that is
// better (1) or worse (-1).
template <class C>
__device__ __forceinline__ int plateau_pass(const Args& a, const Row<typename C::E>& row, int32_t index,
                                            const Slice& slice, uint32_t key, uint32_t rank, Path path) {
  auto& s = *reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem());
  uint8_t* arena = ptx::dynamic_smem() + sizeof(s);
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(arena + a.arena_bytes);
  const PlateauResult r =
      plateau_row<C>(a, row, slice, key, rank, bitmap, reinterpret_cast<uint32_t*>(arena), s.heads, s.wa, s.wb);
  if (r.verdict == 0) {
    count_path<C>(a, rank, path);
    finish_row<C>(a, index, row, slice, s, arena, bitmap, r.lower, 0);
  }
  return r.verdict;
}

// Finishes a row by the path that is right for every row.
template <class C>
__device__ __noinline__ void exact_path(const Args& a) {
  const uint32_t rank = block_rank<C>();
  const int32_t index = row_index<C>(a);
  count_path<C>(a, rank, kExact);
  const Row<typename C::E> row(a, index);
  uint8_t* arena = ptx::dynamic_smem() + sizeof(FilterShared<C::kBins>);
  static_assert(sizeof(ExactShared) <= C::kListBytes, "it takes the place of the lists");
  exact_row<typename C::E, C::kThreads, C::kMulti>(a, row, index, *reinterpret_cast<ExactShared*>(arena), rank);
}

// One filtered pass of the bracket. Where it holds, finishes the row; else next(miss, share of the candidates that are
// to be taken) does. Whatever finishes the row is the last thing that happens here: nothing waits in registers for it.
template <class C, int kBatch, class F>
__device__ __forceinline__ void filtered_pass(const Args& a, const Row<typename C::E>& row, int32_t index,
                                              const Slice& slice, const Bracket& b, uint32_t rank, Path path,
                                              F&& next) {
  auto& s = *reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem());
  uint8_t* arena = ptx::dynamic_smem() + sizeof(s);
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(arena + a.arena_bytes);
  const Candidates<C> candidates(a, s, arena);
  ptx::row_sync<C::kMulti>();  // the counts of the pass before were read everywhere
  if (threadIdx.x == 0) s.spill_count = 0;
  for (int i = threadIdx.x; i < C::kBins; i += C::kThreads) s.hist[i] = 0;  // the pass before may have counted
  __syncthreads();
  const int entries = stream_filter<C, kBatch>(row, slice, b.lo, b.hi, bitmap, candidates);
  const float scale = histogram_scale<C::kBins>(b.bin_lo, b.bin_hi);
  const Tally t = tally<C>(a, s, candidates, entries, b.bin_hi, scale, rank, bitmap, slice.last - slice.first);
  if (!t.holds()) {
    next(t.miss(), t.share());
    return;
  }
  count_path<C>(a, rank, path);
  Taker<C> take{bitmap, slice.first, slice.last, 0};
  if (t.need > 0) {
    const Found crossing = crossing_bin<C>(candidates, entries, b.bin_hi, scale, t.need);
    if (crossing.count > kTieCap) {
      crowded_row<C>(a, entries, b.bin_hi, scale, crossing.bin, t.need - crossing.above, t.lower);
      return;
    }
    take_ranked<C>(a, candidates, entries, b.bin_hi, scale, crossing, t.need - crossing.above, take);
  }
  finish_row<C>(a, index, row, slice, s, arena, bitmap, t.lower, take.lower);
}

// The last pass of a row whose k-th key lies in [low, high]: one key, or so few scores that they fit the spill list
// whoever finds them.
template <class C>
__device__ __noinline__ void last_pass(const Args& a, uint32_t low, uint32_t high) {
  const uint32_t rank = block_rank<C>();
  const int32_t index = row_index<C>(a);
  const Row<typename C::E> row(a, index);
  const Slice slice = slice_of(row, C::kMulti ? a.cluster : 1, rank);
  if (low == high) {
    plateau_pass<C>(a, row, index, slice, low, rank, kCounted);
    return;
  }
  Bracket b;
  b.lo = float_of(low);
  b.hi = float_of(high == 0x7fffffffu ? 0x7ffffffeu : high);  // no score has the key of -0
  b.set_bins(b.lo, b.hi);
  filtered_pass<C, 4>(a, row, index, slice, b, rank, kCounted, [](Miss, float) {});
}

// Finishes a row that two passes did not settle: counting passes close in on the k-th key from the guess [low, high].
template <class C>
__device__ __noinline__ void settle_row(const Args& a, uint32_t low, uint32_t high) {
  auto& s = *reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem());
  auto& counts = *reinterpret_cast<KeyCounts*>(ptx::dynamic_smem() + sizeof(s));
  static_assert(sizeof(KeyCounts) <= C::kListBytes, "it takes the place of the lists");
  const Row<typename C::E> row(a, row_index<C>(a));
  const Slice slice = slice_of(row, C::kMulti ? a.cluster : 1, block_rank<C>());
  bool few;
  do {
    few = count_keys<C>(a, row, slice, low, high, counts, s.wa, s.found);
  } while (low != high && !few);
  ptx::row_sync<C::kMulti>();  // the counts were read everywhere
  last_pass<C>(a, low, high);
}

// Finishes a row whose bracket [lo, hi] lay too low or too high, by one more filtered pass beside it; or whose sample
// shows a heavy value, by a plateau pass and if need be a filtered pass beside it; or else by counting.
template <class C>
__device__ __noinline__ void retry_row(const Args& a, float lo, float hi, Miss miss, float share) {
  const uint32_t rank = block_rank<C>();
  const int32_t index = row_index<C>(a);
  auto& s = *reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem());
  const Row<typename C::E> row(a, index);
  const int32_t blocks = C::kMulti ? a.cluster : 1;
  const Slice slice = slice_of(row, blocks, rank);
  ptx::row_sync<C::kMulti>();  // what the pass before left in shared memory was written, and read everywhere
  // The equal bits of a plateau pass take the place of the lists: the same answer in every block.
  if ((row_words(row) + blocks - 1) / blocks * 4 > a.arena_bytes) {
    exact_path<C>(a);
    return;
  }
  Bracket b;
  b.lo = lo;
  b.hi = hi;
  const uint32_t heavy = s.heavy;
  bool possible = true;
  if (miss == kHeavyValue || (heavy != 0 && ((miss == kTooHigh && key_of(lo) == key_above(heavy)) ||
                                             (miss == kTooLow && key_of(hi) == key_below(heavy))))) {
    const int verdict = plateau_pass<C>(a, row, index, slice, heavy, rank, kPlateau);
    if (verdict == 0) return;
    possible = move_bracket(b, s.bottom, s.top, heavy, verdict > 0);
  } else if (miss == kFullList) {
    b.set_bins(s.bottom, s.top);
    narrow_bracket(b, s.bottom, s.top, share);
  } else {
    possible = move_bracket(b, s.bottom, s.top, key_of(miss == kTooLow ? hi : lo), miss == kTooLow);
  }
  if (possible) {
    filtered_pass<C, 4>(a, row, index, slice, b, rank, kSecondTry,
                        [&](Miss, float) { settle_row<C>(a, clamp_key(key_of(b.lo)), clamp_key(key_of(b.hi))); });
  } else {
    settle_row<C>(a, clamp_key(key_of(b.lo)), clamp_key(key_of(b.hi)));
  }
}

// Finishes a row whose sample must be looked at closer; it lies where the lists will be.
template <class C>
__device__ __noinline__ void closer_row(const Args& a, float lo, float hi, Sight sight) {
  const uint32_t rank = block_rank<C>();
  const int32_t index = row_index<C>(a);
  auto& s = *reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem());
  const Row<typename C::E> row(a, index);
  Bracket b;
  b.lo = lo;
  b.hi = hi;
  b.sight = sight;
  const bool plateau =
      look_closer<C>(b, SampleRanks(C::kThreads * C::kSamples, a.k, row.n, a.margin), sample_place<C>(a), s);
  if (plateau) {
    retry_row<C>(a, b.lo, b.hi, kHeavyValue, 0.0f);
    return;
  }
  const Slice slice = slice_of(row, C::kMulti ? a.cluster : 1, rank);
  filtered_pass<C, C::kBatch>(a, row, index, slice, b, rank, kFast,
                              [&](Miss miss, float share) { retry_row<C>(a, b.lo, b.hi, miss, share); });
}

}  // namespace dsa
