// The path that is right for every row: radix search for the k-th key over global memory, then an ordered pass.
//
// Four 8-bit digits from the top find the k-th largest key T and how many copies of T are needed. A counting pass gives
// every warp the number of winners and ties before its segment; a last pass writes the winners in ascending position.
// No buffer depends on the data: any width, any k, any number of ties. Six reads of the row: it serves windows
// too short to sample, and rows too wide for the bitmaps of the other passes. With kMulti the
// blocks of a cluster share the row: histograms and counts are summed over distributed shared memory.
#pragma once
#include "block.cuh"
#include "row.cuh"

namespace dsa {

struct ExactShared {
  uint32_t hist[256];
  uint32_t total[256];
  uint32_t winners[32], ties[32];  // of each warp's segment
  uint32_t block_winners, block_ties;
  uint32_t digit, above, count, unused;
};

template <class E, int kThreads, bool kMulti>
__device__ __forceinline__ void exact_row(const Args& a, const Row<E>& row, int64_t index, ExactShared& s,
                                          uint32_t rank) {
  constexpr int kWarps = kThreads / 32, kUnroll = 4;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t blocks = kMulti ? a.cluster : 1;
  const typename E::Bits* scores = row.window;
  // This block's slice, cut into one contiguous segment a warp.
  const int64_t n = row.n;
  const int64_t block_begin = n * rank / blocks, block_end = n * (rank + 1) / blocks;
  const int64_t slice = block_end - block_begin;
  // Unsigned: an index may pass 2^31 by a step.
  const uint32_t begin = static_cast<uint32_t>(block_begin + slice * warp / kWarps);
  const uint32_t end = static_cast<uint32_t>(block_begin + slice * (warp + 1) / kWarps);

  uint32_t prefix = 0, mask = 0, need = static_cast<uint32_t>(a.k), ties = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = tid; i < 256; i += kThreads) s.hist[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i0 = begin; i0 < end; i0 += 32 * kUnroll) {
      uint32_t key[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t i = i0 + u * 32 + lane;
        key[u] = i < end ? key_of(E::value(ptx::ld_stream(scores + i))) : 0u;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool in = i0 + u * 32 + lane < end && ((key[u] ^ prefix) & mask) == 0;
        const uint32_t digit = in ? (key[u] >> shift) & 255u : 256u;
        // Rows come here because many keys are alike: one atomic a warp when all lanes agree.
        int same;
        __match_all_sync(ptx::kFullMask, digit, &same);
        if (same) {
          if (in && lane == 0) atomicAdd(&s.hist[digit], 32u);
        } else if (in) {
          atomicAdd(&s.hist[digit], 1u);
        }
      }
    }
    ptx::row_sync<kMulti>();
    for (int i = tid; i < 256; i += kThreads) {
      uint32_t sum = s.hist[i];
      if (kMulti) {
        sum = 0;
        for (int32_t r = 0; r < blocks; ++r) sum += *ptx::map_shared(&s.hist[i], r);
      }
      s.total[i] = sum;
    }
    ptx::row_sync<kMulti>();
    if (warp == 0) {  // 8 digits a lane, best first
      uint32_t c[8], sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        c[j] = s.total[255 - (lane * 8 + j)];
        sum += c[j];
      }
      uint32_t before = warp_inclusive_sum(sum, lane) - sum;
      if (before < need && need <= before + sum) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (before < need && need <= before + c[j]) {
            s.digit = 255 - (lane * 8 + j);
            s.above = before;
            s.count = c[j];
          }
          before += c[j];
        }
      }
    }
    __syncthreads();
    prefix |= s.digit << shift;
    mask |= 255u << shift;
    need -= s.above;
    ties = s.count;
  }
  const uint32_t threshold = prefix;  // `need` of the `ties` copies of it are selected
  // Ties [tie_first, tie_last) in position order are the ones to take.
  const uint32_t tie_first = a.largest ? ties - need : 0u, tie_last = a.largest ? ties : need;

  uint32_t winners_before = 0, ties_before = 0;
#pragma unroll 1
  for (uint32_t i0 = begin; i0 < end; i0 += 32 * kUnroll) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = i0 + u * 32 + lane;
      const uint32_t key = i < end ? key_of(E::value(ptx::ld_stream(scores + i))) : 0u;
      winners_before += i < end && key > threshold;
      ties_before += i < end && key == threshold;
    }
  }
  winners_before = __reduce_add_sync(ptx::kFullMask, winners_before);
  ties_before = __reduce_add_sync(ptx::kFullMask, ties_before);
  if (lane == 0) {
    s.winners[warp] = winners_before;
    s.ties[warp] = ties_before;
  }
  __syncthreads();
  winners_before = warp_sum_first(s.winners, warp, lane);
  ties_before = warp_sum_first(s.ties, warp, lane);
  if (kMulti) {
    const uint32_t all_winners = warp_sum_first(s.winners, kWarps, lane),
                   all_ties = warp_sum_first(s.ties, kWarps, lane);
    if (tid == 0) {
      s.block_winners = all_winners;
      s.block_ties = all_ties;
    }
    ptx::row_sync<kMulti>();
    for (uint32_t r = 0; r < rank; ++r) {
      winners_before += *ptx::map_shared(&s.block_winners, r);
      ties_before += *ptx::map_shared(&s.block_ties, r);
    }
    ptx::cluster_arrive();  // peers may read this block's counts until they arrive too
  }
  const Row<E> again(a, index);  // found only now: registers are short in the passes above
  const Output<E> output(a, again, index);
  const uint32_t below = (1u << lane) - 1u;
#pragma unroll 1
  for (uint32_t i0 = begin; i0 < end; i0 += 32) {
    const uint32_t i = i0 + lane;
    const uint32_t key = i < end ? key_of(E::value(ptx::ld_stream(scores + i))) : 0u;
    const bool win = i < end && key > threshold, tie = i < end && key == threshold;
    const uint32_t win_ballot = __ballot_sync(ptx::kFullMask, win), tie_ballot = __ballot_sync(ptx::kFullMask, tie);
    if ((win_ballot | tie_ballot) == 0) continue;
    const uint32_t tie_index = ties_before + __popc(tie_ballot & below);
    const uint32_t taken =
        (tie_index < tie_last ? tie_index : tie_last) - (tie_index < tie_first ? tie_index : tie_first);
    if (win || (tie && tie_index >= tie_first && tie_index < tie_last)) {
      output.put(static_cast<int32_t>(winners_before + __popc(win_ballot & below) + taken), i);
    }
    winners_before += __popc(win_ballot);
    ties_before += __popc(tie_ballot);
  }
  if (kMulti) ptx::cluster_wait();
}

}  // namespace dsa
