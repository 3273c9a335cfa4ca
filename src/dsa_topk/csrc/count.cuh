// Closing in on the k-th key by counting: one pass over the row leaves a thousandth of a range of keys.
//
// The range may be a guess: what lies above it is counted too, and a wrong guess moves to the side that is left.
#pragma once
#include "slice.cuh"

namespace dsa {

constexpr int kKeyBins = 512;  // bin 0: keys above the range

struct KeyCounts {
  uint32_t own[kKeyBins], row[kKeyBins];  // of this block's slice, and of the whole row
};

// Keys of scores; NaN's, 0, is none of them.
__device__ __forceinline__ uint32_t clamp_key(uint32_t key) {
  return key < kKeyMinusInf ? kKeyMinusInf : key > kKeyPlusInf ? kKeyPlusInf : key;
}

// One counting pass: moves [low, high] closer around the k-th key. True at the end: it is one key (0 for NaN), or the
// range holds so few scores that every list has room for them.
template <class C>
__device__ __forceinline__ bool count_keys(const Args& a, const Row<typename C::E>& row, const Slice& slice,
                                           uint32_t& low, uint32_t& high, KeyCounts& counts, uint32_t* warp_sums,
                                           Found* found) {
  constexpr int kThreads = C::kThreads, kUnroll = 8;
  const int tid = threadIdx.x;
  ptx::row_sync<C::kMulti>();  // the counts of the round before were read everywhere
  for (int i = tid; i < kKeyBins; i += kThreads) counts.own[i] = 0;
  __syncthreads();
  int shift = 0;
  while ((high - low) >> shift > kKeyBins - 2) ++shift;
  const int32_t from = slice.first * 32 - slice.shift, to = slice.last * 32 - slice.shift;
  const int32_t begin = from > 0 ? from : 0, end = to < row.n ? to : row.n;
#pragma unroll 1
  for (int32_t i0 = begin + tid; i0 < end; i0 += kThreads * kUnroll) {
    typename C::E::Bits x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t i = i0 + u * kThreads;
      x[u] = i < end ? ptx::ld_stream(row.window + i) : C::E::kNaN;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t key = key_of(C::E::value(x[u]));
      if (key >= low) atomicAdd(&counts.own[key > high ? 0u : ((high - key) >> shift) + 1u], 1u);
    }
  }
  ptx::row_sync<C::kMulti>();
  for (int i = tid; i < kKeyBins; i += kThreads) {
    uint32_t sum = counts.own[i];
    if (C::kMulti) {
      sum = 0;
      for (int32_t r = 0; r < a.cluster; ++r) sum += *ptx::map_shared(&counts.own[i], r);
    }
    counts.row[i] = sum;
  }
  __syncthreads();
  const int32_t ranks[1] = {a.k};
  find_ranks<kThreads, kKeyBins, 1>(counts.row, warp_sums, found, ranks);
  const Found f = found[0];
  if (f.bin == 0) {  // it lies above
    low = high + 1u;
    high = kKeyPlusInf;
    return false;
  }
  if (f.bin < 0) {  // below
    const bool nan = low == kKeyMinusInf;
    high = nan ? 0u : low - 1u;
    low = nan ? 0u : kKeyMinusInf;
    return nan;
  }
  high -= static_cast<uint32_t>(f.bin - 1) << shift;
  const uint32_t reach = (1u << shift) - 1u;
  if (high - low > reach) low = high - reach;
  return low == high || f.count <= C::kSpill;
}

}  // namespace dsa
