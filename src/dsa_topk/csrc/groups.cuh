// Ordered slots for scores held in registers: prefix sums over a block, in the order of held.cuh.
#pragma once
#include "held.cuh"

namespace dsa {

// A byte for each of a thread's groups of four: how many of them are taken, or how many come before.
struct GroupCounts {
  uint32_t low, high;  // groups 0 to 3, 4 to 7

  __device__ __forceinline__ uint32_t operator[](int group) const {
    return (group < 4 ? low >> (8 * group) : high >> (8 * (group - 4))) & 255u;
  }
};

// Adds the thread's scores that are taken.
template <class C>
__device__ __forceinline__ void count_groups(GroupCounts& counts, const float (&x)[C::kPer], float least) {
#pragma unroll
  for (int i = 0; i < C::kPer; ++i)
    ptx::add_at_least(i < 16 ? counts.low : counts.high, x[i], least, 1u << (8 * (i / 4 & 3)));
}

// From each thread's counts: the slots before its groups in the row. `all` gets the warp's counts. Order is by warp,
// group, lane; a group has at most 128 in a warp, so bytes do not overflow. Contains a barrier.
template <class C>
__device__ __forceinline__ int32_t slots_before(GroupCounts& counts, GroupCounts& all, uint32_t* warp_counts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const GroupCounts own = counts;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const uint32_t l = __shfl_up_sync(ptx::kFullMask, counts.low, d);
    if (lane >= d) counts.low += l;
    if (C::kVectors > 4) {
      const uint32_t h = __shfl_up_sync(ptx::kFullMask, counts.high, d);
      if (lane >= d) counts.high += h;
    }
  }
  all.low = __shfl_sync(ptx::kFullMask, counts.low, 31);
  all.high = C::kVectors > 4 ? __shfl_sync(ptx::kFullMask, counts.high, 31) : 0u;
  counts.low -= own.low;
  counts.high -= own.high;
  uint32_t total = 0;
#pragma unroll
  for (int j = 0; j < C::kVectors; ++j) total += all[j];
  if (lane == 0) warp_counts[warp] = total;
  __syncthreads();
  return static_cast<int32_t>(warp_sum_first(warp_counts, warp, lane));
}

}  // namespace dsa
