// Block-wide pieces: sums over lower warps, least and greatest, and the bins of a histogram where given ranks fall.
#pragma once
#include "ptx.cuh"

namespace dsa {

// Sum of values[0 .. count) over the warp's lanes, count <= 32; every lane gets it.
__device__ __forceinline__ uint32_t warp_sum_first(const uint32_t* values, int count, int lane) {
  return __reduce_add_sync(ptx::kFullMask, lane < count ? values[lane] : 0u);
}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const uint32_t y = __shfl_up_sync(ptx::kFullMask, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

// The least of `least` and the greatest of `most` over the block. The words, one a warp, must not be in use: a barrier
// must lie between other use of them and this.
template <int kWarps>
__device__ __forceinline__ void block_ends(uint32_t* warp_least, uint32_t* warp_most, uint32_t& least, uint32_t& most) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  least = __reduce_min_sync(ptx::kFullMask, least);
  most = __reduce_max_sync(ptx::kFullMask, most);
  if (lane == 0) {
    warp_least[warp] = least;
    warp_most[warp] = most;
  }
  __syncthreads();
  least = __reduce_min_sync(ptx::kFullMask, lane < kWarps ? warp_least[lane] : 0xffffffffu);
  most = __reduce_max_sync(ptx::kFullMask, lane < kWarps ? warp_most[lane] : 0u);
}

struct Found {
  int32_t bin;    // bin in which the rank falls, -1: the histogram holds fewer
  int32_t above;  // entries in the bins before it
  int32_t count;  // entries in it
  int32_t unused;
};

// Bins are numbered from the best. For each 1-based rank finds the bin in which the running count reaches it, and
// clears the histogram. All threads of the block; a barrier must lie between the last write to `hist` (and the last
// read of `found`) and this call. Uses `warp_sums` as scratch.
template <int kThreads, int kBins, int kRanks>
__device__ __forceinline__ void find_ranks(uint32_t* hist, uint32_t* warp_sums, Found* found,
                                           const int32_t (&ranks)[kRanks]) {
  constexpr int kPer = kBins / kThreads;
  static_assert(kPer >= 1 && kPer * kThreads == kBins, "every thread owns the same number of bins");
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint32_t h[kPer], sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    h[i] = hist[tid * kPer + i];
    sum += h[i];
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) hist[tid * kPer + i] = 0;
  const uint32_t inclusive = warp_inclusive_sum(sum, lane);
  if (lane == 31) warp_sums[warp] = inclusive;
  if (tid < kRanks) found[tid].bin = -1;
  __syncthreads();
  const int32_t before = static_cast<int32_t>(warp_sum_first(warp_sums, warp, lane) + inclusive - sum);
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (before < ranks[r] && ranks[r] <= before + static_cast<int32_t>(sum)) {
      int32_t at = before;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int32_t next = at + static_cast<int32_t>(h[i]);
        if (at < ranks[r] && ranks[r] <= next) found[r] = Found{tid * kPer + i, at, static_cast<int32_t>(h[i]), 0};
        at = next;
      }
    }
  }
  __syncthreads();
}

}  // namespace dsa
