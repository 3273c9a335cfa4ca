// How the steps of a rare row (retry.cuh) follow each other, and how a row is finished.
//
// A step notes in shared memory what the next one must know and returns that one's number, so that no step keeps
// registers for what comes after it.
#pragma once
#include "emit.cuh"
#include "sample.cuh"
#include "tally.cuh"

namespace dsa {

enum Step : uint32_t {
  kDone,
  kCloser,
  kPass,
  kChoose,
  kRetry,
  kHeavy,
  kAround,
  kSecond,
  kSettle,
  kCrowd,
  kEmit,
  kExactly
};

// A step's number, and (kChoose, kCrowd) the length of this thread's own list.
__device__ __forceinline__ uint32_t step(Step s, int entries = 0) {
  return static_cast<uint32_t>(s) | static_cast<uint32_t>(entries) << 4;
}

template <class C>
__device__ __forceinline__ uint32_t block_rank() {
  return C::kMulti ? ptx::cluster_rank() : 0u;
}

// Causal prefill has its longest rows last: they go first.
template <class C>
__device__ __forceinline__ int32_t row_index(const Args& a) {
  return C::kMulti || C::kSpread ? static_cast<int32_t>(blockIdx.x / static_cast<uint32_t>(a.cluster))
                                 : a.rows - 1 - static_cast<int32_t>(blockIdx.x);
}

template <class C>
__device__ __forceinline__ void count_path(const Args& a, uint32_t rank, Path p) {
  if (a.counters && rank == 0 && threadIdx.x == 0) atomicAdd(a.counters + p, 1u);
}

// What every step finds again: registers are short, and loads are few where rows are rare.
template <class C>
struct Place {
  using E = typename C::E;

  const Args& a;
  const uint32_t rank;
  const int32_t index, blocks;
  FilterShared<C::kBins>& s;
  uint8_t* arena;
  uint32_t* bitmap;

  __device__ __forceinline__ explicit Place(const Args& args)
      : a(args),
        rank(block_rank<C>()),
        index(row_index<C>(args)),
        blocks(C::kMulti ? args.cluster : 1),
        s(*reinterpret_cast<FilterShared<C::kBins>*>(ptx::dynamic_smem())),
        arena(ptx::dynamic_smem() + sizeof(s)),
        bitmap(reinterpret_cast<uint32_t*>(arena + args.arena_bytes)) {}

  __device__ __forceinline__ Row<E> row() const { return Row<E>(a, index); }
  // The same once it was noted; follows a barrier.
  __device__ __forceinline__ void note(const Row<E>& row) const {
    if (threadIdx.x != 0) return;
    s.where = row.where;
    s.window = reinterpret_cast<uint64_t>(row.window);
    s.n = row.n;
  }
  __device__ __forceinline__ Row<E> noted() const {
    return Row<E>(reinterpret_cast<const typename E::Bits*>(s.window), s.n, s.where);
  }
  __device__ __forceinline__ Slice slice(const Row<E>& r) const { return slice_of(r, blocks, rank); }
};

// Asks for the first `most` bytes of a slice (whatever the sign; launch.h's args say what it means).
template <class E>
__device__ __forceinline__ void prefetch_head(const Row<E>& row, const Slice& slice, int32_t most) {
  constexpr int32_t kSize = sizeof(typename E::Bits), kSixteen = 16 / kSize;
  // Whole 16-byte units that lie inside the window: from the second unit of the slice on.
  const int32_t first = (slice.first + E::kLoad) * 32 - slice.shift, end = slice.last * 32 - slice.shift;
  const int32_t count = ((end < row.n ? end : row.n) - first) & ~(kSixteen - 1);
  const int32_t wanted = most < 0 ? -most : most, bytes = count < wanted / kSize ? count * kSize : wanted;
  if (bytes > 0) ptx::prefetch_l2(row.window + first, static_cast<uint32_t>(bytes));
}

// Asks for a filtered pass of the bracket, after which the row counts as served by this path.
template <class S>
__device__ __forceinline__ uint32_t ask_pass(S& s, const Bracket& b, Path path, Step pass = kPass) {
  if (threadIdx.x == 0) {
    s.lo = b.lo;
    s.hi = b.hi;
    s.bin_lo = b.bin_lo;
    s.bin_hi = b.bin_hi;
    s.path = path;
  }
  return step(pass);
}

// Asks for a plateau pass of the value with this key.
template <class S>
__device__ __forceinline__ uint32_t ask_plateau(S& s, uint32_t key, Path path) {
  if (threadIdx.x == 0) {
    s.heavy = key;
    s.path = path;
  }
  return step(kHeavy);
}

// All bits are set: asks for their emission. `lower`: what the blocks before this one have selected, but for what this
// block's threads chose of them among the candidates.
template <class C>
__device__ __forceinline__ uint32_t ask_emission(FilterShared<C::kBins>& s, uint32_t lower, uint32_t chosen_lower) {
  if (C::kMulti) {
    chosen_lower = __reduce_add_sync(ptx::kFullMask, chosen_lower);
    if ((threadIdx.x & 31) == 0) s.wb[threadIdx.x >> 5] = chosen_lower;
  }
  if (threadIdx.x == 0) s.lower = lower;
  return step(kEmit);
}

// The end of every row whose results a bitmap has.
template <class C>
__device__ __forceinline__ void emit_row(const Args& a) {
  using E = typename C::E;
  const Place<C> at(a);
  __syncthreads();  // all bits are set, and what is read here was noted
  uint32_t lower = at.s.lower;
  if (C::kMulti) lower += warp_sum_first(at.s.wb, C::kWarps, threadIdx.x & 31);
  const Row<E> row = at.noted();
  emit_bitmap<C::kThreads, C::kStage>(Output<E>(a, row, at.index), at.slice(row), at.bitmap,
                                      reinterpret_cast<uint32_t*>(at.arena), at.s.wc, static_cast<int32_t>(lower));
}

// What follows a pass whose bracket did not hold, or whose crossing bin is crowded.
template <class C>
__device__ __forceinline__ uint32_t missed(FilterShared<C::kBins>& s, const Tally& t, Step next) {
  if (threadIdx.x == 0) {
    s.miss = t.miss();
    s.share = t.share();
  }
  return step(next);
}
// The same where the choice found too few candidates (crossing_bin).
template <class C>
__device__ __forceinline__ uint32_t missed_below(FilterShared<C::kBins>& s, Step next) {
  if (threadIdx.x == 0) s.miss = kTooHigh;
  return step(next);
}
template <class C>
__device__ __forceinline__ uint32_t crowded(FilterShared<C::kBins>& s, const Tally& t, const Found& crossing, float top,
                                            float scale, int entries) {
  if (threadIdx.x == 0) s.crowd = Crowd{top, scale, crossing.bin, t.need - crossing.above, t.lower};
  return step(kCrowd, entries);
}

}  // namespace dsa
