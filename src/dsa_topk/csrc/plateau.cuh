// Rows whose k-th score is (probably) one heavily repeated value v: ReLU zeros, masks, constant rows.
//
// One pass with two bitmaps, "better than v" and "equal to v": any number of ties fits, and which of them are taken
// follows from their position. Compares integer keys, so v may be an infinity or NaN. The caller sees to it that a
// second bitmap fits where the lists were.
#pragma once
#include "slice.cuh"

namespace dsa {

struct PlateauResult {
  int verdict;     // 0: the bitmap is final; 1: the k-th score is better than v; -1: worse
  uint32_t lower;  // selected in the blocks before this one
};

template <class C>
__device__ __forceinline__ PlateauResult plateau_row(const Args& a, const Row<typename C::E>& row, const Slice& slice,
                                                     uint32_t key, uint32_t rank, uint32_t* bitmap, uint32_t* equal,
                                                     BlockCounts* heads, uint32_t* wa, uint32_t* wb) {
  constexpr int kWarps = C::kWarps, kUnroll = 4;
  constexpr bool kMulti = C::kMulti;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t blocks = kMulti ? a.cluster : 1;
  const int32_t words = slice.last - slice.first;
  // A warp owns a contiguous part of the words, so that its counts are also prefixes.
  const int32_t per_warp = (words + kWarps - 1) / kWarps;
  const int32_t begin = warp * per_warp, end = words < begin + per_warp ? words : begin + per_warp;
  uint32_t winners = 0, ties = 0;
  const auto n = static_cast<uint32_t>(row.n);
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end; i0 += kUnroll) {
    typename C::E::Bits x[kUnroll];
    // Of a score of this lane's first word; below 0 wraps to what is no position.
    const uint32_t p = static_cast<uint32_t>((slice.first + i0) * 32 + lane - slice.shift);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      x[u] = p + u * 32 < n && i0 + u < end ? ptx::ld_stream(row.window + (p + u * 32)) : C::E::kNaN;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i0 + u >= end) break;
      const uint32_t mine = key_of(C::E::value(x[u]));
      const uint32_t win = __ballot_sync(ptx::kFullMask, mine > key),
                     tie = __ballot_sync(ptx::kFullMask, mine == key && p + u * 32 < n);
      if (lane == 0) {
        bitmap[i0 + u] = win;
        equal[i0 + u] = tie;
      }
      winners += __popc(win);
      ties += __popc(tie);
    }
  }
  if (lane == 0) {
    wa[warp] = winners;
    wb[warp] = ties;
  }
  __syncthreads();
  uint32_t all_winners = warp_sum_first(wa, kWarps, lane), all_ties = warp_sum_first(wb, kWarps, lane);
  uint32_t ties_before = warp_sum_first(wb, warp, lane), winners_lower = 0, ties_lower = 0;
  if (kMulti) {
    if (tid < blocks) ptx::map_shared(heads, tid)[rank] = BlockCounts{all_winners, all_ties};
    ptx::row_sync<true>();
    all_winners = all_ties = 0;
    for (int32_t r = 0; r < blocks; ++r) {
      if (static_cast<uint32_t>(r) == rank) {
        winners_lower = all_winners;
        ties_lower = all_ties;
      }
      all_winners += heads[r].selected;
      all_ties += heads[r].more;
    }
  }
  const uint32_t k = static_cast<uint32_t>(a.k);
  if (all_winners >= k + 1) return PlateauResult{1, 0};
  const uint32_t need = k - all_winners;
  if (need > all_ties) return PlateauResult{-1, 0};
  // Ties [first, last) in position order are taken.
  const uint32_t first = a.largest ? all_ties - need : 0u, last = a.largest ? all_ties : need;
  uint32_t index = ties_lower + ties_before;
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end; i0 += 32) {
    const int32_t i = i0 + lane;
    uint32_t word = i < end ? equal[i] : 0u;
    const uint32_t bits = __popc(word), inclusive = warp_inclusive_sum(bits, lane);
    uint32_t at = index + inclusive - bits;  // number of ties before this word
    index += __shfl_sync(ptx::kFullMask, inclusive, 31);
    uint32_t taken = 0;
    if (at >= first && at + bits <= last) {
      taken = word;
    } else {
      for (; word; word &= word - 1, ++at) {
        if (at >= first && at < last) taken |= word & (0u - word);
      }
    }
    if (taken) bitmap[i] |= taken;
    __syncwarp();
  }
  const uint32_t taken_lower = (ties_lower < last ? ties_lower : last) - (ties_lower < first ? ties_lower : first);
  __syncthreads();
  return PlateauResult{0, winners_lower + taken_lower};
}

}  // namespace dsa
