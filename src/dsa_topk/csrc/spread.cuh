// Rows spread over the device without clusters: the blocks of a row meet in a workspace in global memory.
#pragma once
#include "lists.cuh"

namespace dsa {

// A row spread over blocks that need not run at the same time: each leaves its list in the workspace, and the last one
// of the row to come takes them all as its own, in order. No block waits for another. False: this block was not the
// last.
//
// Workspace: kTickets counters, one a row, zero between launches; then a region a block: how many, scores, results.
template <class C>
__device__ __forceinline__ bool gather_lists(const Args& a, SplitShared<C>& shared, int32_t index, uint32_t rank,
                                             uint32_t& run, const typename C::E::Bits* window, int32_t n,
                                             bool& results) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const uint32_t blocks = static_cast<uint32_t>(a.cluster), cap = static_cast<uint32_t>(a.region_cap),
                 pitch = 4u + 2u * cap;
  uint32_t* regions = a.workspace + kTickets + static_cast<uint32_t>(index) * blocks * pitch;
  uint32_t* own = regions + rank * pitch;
  const Row<typename C::E> row(window, n, shared.kth.where);
  const Output<typename C::E> output(a, row, index);
  results = !output.positions && !output.scores;
  const bool fits = run <= cap;
  ptx::wait_copies();
  __syncthreads();  // the list and the pages are complete
  const StagedPages staged{shared.pages, shared.first_page};
  if (fits) {
#pragma unroll 1
    for (uint32_t i = tid; i < run; i += C::kThreads) {
      const uint32_t p = static_cast<uint32_t>(shared.positions[i]);
      own[4 + i] = __float_as_uint(shared.scores[i]);
      own[4 + cap + i] = !results                             ? p
                         : staged.first != kNoPages && !a.raw ? staged.result(a, p)
                                                              : static_cast<uint32_t>(output.stored(p));
    }
  }
  if (tid == 0) own[0] = fits ? run : kTooMany;
  __threadfence();
  __syncthreads();
  if (tid == 0) shared.lower = atomicAdd(a.workspace + index, 1u);
  __syncthreads();
  if (shared.lower != blocks - 1u) return false;
  __threadfence();
  // Where each block's list goes: thread t looks at block t.
  const uint32_t count = static_cast<uint32_t>(tid) < blocks ? ptx::ld_others(regions + tid * pitch) : 0u;
  const uint32_t bounded = count < kTooMany ? count : kTooMany, inclusive = warp_inclusive_sum(bounded, lane);
  if (lane == 31) shared.kth.wa[warp] = inclusive;
  __syncthreads();
  const uint32_t before = warp_sum_first(shared.kth.wa, warp, lane) + inclusive - bounded;
  run = warp_sum_first(shared.kth.wa, C::kWarps, lane);
  shared.pages[tid] = static_cast<int32_t>(before);
  if (tid == 0) {
    shared.lower = 0;
    a.workspace[index] = 0;  // for the next launch
  }
  __syncthreads();
  if (run <= C::kEntries) {
#pragma unroll 1
    for (uint32_t b = warp; b < blocks; b += C::kWarps) {
      const uint32_t to = static_cast<uint32_t>(shared.pages[b]),
                     many = static_cast<uint32_t>(shared.pages[b + 1]) - to;
      const uint32_t* from = regions + b * pitch + 4;
#pragma unroll 2
      for (uint32_t i = lane; i < many; i += 32) {
        shared.scores[to + i] = __uint_as_float(ptx::ld_others(from + i));
        shared.positions[to + i] = static_cast<int32_t>(ptx::ld_others(from + cap + i));
      }
    }
  }
  return true;
}

}  // namespace dsa
