// Rows whose k-th score is (probably) one heavily repeated value v: ReLU zeros, masks, constant rows.
//
// One pass with two bitmaps, "better than v" and "equal to v": any number of ties fits, and which of them are taken
// follows from their position. The caller sees to it that a second bitmap fits where the lists were.
#pragma once
#include "slice.cuh"

namespace dsa {

struct PlateauResult {
  int verdict;     // 0: the bitmap is final; 1: the k-th score is better than v; -1: worse
  uint32_t lower;  // selected in the blocks before this one
};

// Words [begin, end) of the two bitmaps, by one warp: better(x) and tied(x) of every score.
template <class C, class F, class G>
__device__ __forceinline__ void compare_words(const Row<typename C::E>& row, const Slice& slice, uint32_t* bitmap,
                                              uint32_t* equal, int32_t begin, int32_t end, F better, G tied) {
  using E = typename C::E;
  constexpr int kUnroll = 8;
  const int lane = threadIdx.x & 31;
  const auto n = static_cast<uint32_t>(row.n);
  const auto put = [&](int32_t i, float x, bool in) {
    const uint32_t win = __ballot_sync(ptx::kFullMask, in && better(x)),
                   tie = __ballot_sync(ptx::kFullMask, in && tied(x));
    if (lane == 0) {
      bitmap[i] = win;
      equal[i] = tie;
    }
  };
  const int32_t origin = slice.first * 32 - slice.shift;  // of the words; below 0 in a partial first one
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end; i0 += kUnroll) {
    const int32_t p = origin + i0 * 32;
    if (i0 + kUnroll <= end && p >= 0 && p + kUnroll * 32 <= row.n) {
      typename E::Bits x[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) x[u] = ptx::ld_stream(row.window + p + u * 32 + lane);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) put(i0 + u, E::value(x[u]), true);
    } else {
#pragma unroll 1
      for (int32_t i = i0; i < end && i < i0 + kUnroll; ++i) {
        const auto at = static_cast<uint32_t>(origin + i * 32 + lane);
        put(i, E::value(at < n ? ptx::ld_stream(row.window + at) : E::kNaN), at < n);
      }
    }
  }
}

// Of the ties in words [begin, end) of `equal`, the first of which is number `index` of its row, takes those with the
// numbers [first, last): by position. By one warp.
__device__ __forceinline__ void take_ties(uint32_t* bitmap, const uint32_t* equal, int32_t begin, int32_t end,
                                          uint32_t index, uint32_t first, uint32_t last) {
  const int lane = threadIdx.x & 31;
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
}

template <class C>
__device__ __forceinline__ PlateauResult plateau_row(const Args& a, const Row<typename C::E>& row, const Slice& slice,
                                                     uint32_t key, uint32_t rank, uint32_t* bitmap, uint32_t* equal,
                                                     BlockCounts* heads, uint32_t* wa, uint32_t* wb) {
  constexpr int kWarps = C::kWarps;
  constexpr bool kMulti = C::kMulti;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t blocks = kMulti ? a.cluster : 1;
  const int32_t words = slice.last - slice.first;
  // A warp owns a contiguous part of the words, so that its counts are also prefixes.
  const int32_t per_warp = (words + kWarps - 1) / kWarps;
  const int32_t begin = warp * per_warp, end = words < begin + per_warp ? words : begin + per_warp;
  if (key == 0) {
    compare_words<C>(
        row, slice, bitmap, equal, begin, end, [](float x) { return x == x; }, [](float x) { return x != x; });
  } else {
    const float v = float_of(key);
    compare_words<C>(
        row, slice, bitmap, equal, begin, end, [v](float x) { return x > v; }, [v](float x) { return x == v; });
  }
  __syncwarp();
  uint32_t winners = 0, ties = 0;
#pragma unroll 2
  for (int32_t i = begin + lane; i < end; i += 32) {
    winners += __popc(bitmap[i]);
    ties += __popc(equal[i]);
  }
  winners = __reduce_add_sync(ptx::kFullMask, winners);
  ties = __reduce_add_sync(ptx::kFullMask, ties);
  if (lane == 0) {
    wa[warp] = winners;
    wb[warp] = ties;
  }
  __syncthreads();
  uint32_t all_winners = warp_sum_first(wa, kWarps, lane), all_ties = warp_sum_first(wb, kWarps, lane);
  uint32_t ties_before = warp_sum_first(wb, warp, lane), winners_lower = 0, ties_lower = 0;
  if (kMulti) {
    if (tid < blocks) ptx::map_shared(heads, tid)[rank] = BlockCounts{all_winners, all_ties, 0u};
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
  const uint32_t first = a.largest ? all_ties - need : 0u, last = a.largest ? all_ties : need;
  take_ties(bitmap, equal, begin, end, ties_lower + ties_before, first, last);
  const uint32_t taken_lower = (ties_lower < last ? ties_lower : last) - (ties_lower < first ? ties_lower : first);
  __syncthreads();
  return PlateauResult{0, winners_lower + taken_lower};
}

}  // namespace dsa
