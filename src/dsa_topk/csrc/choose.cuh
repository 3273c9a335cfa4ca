// The exact choice among the candidates: which of them are the `need` best.
//
// A histogram of the bracket finds the bin where the count reaches `need`. Better bins are taken whole; the crossing
// bin's few entries are ranked all against all by (score, tie order), a crowded one by radix rounds on the same
// composite key.
#pragma once
#include "config.cuh"

namespace dsa {

template <int kBins>
__device__ __forceinline__ int32_t bin_of(float x, float top,
                                          float scale) {  // 0 = best; NaN and out-of-range values saturate
  const uint32_t b = __float2uint_rz((top - x) * scale);
  return static_cast<int32_t>(b < kBins - 1 ? b : kBins - 1);
}

template <int kBins>
__device__ __forceinline__ float histogram_scale(float bottom, float top) {  // bins per unit of score
  return top > bottom ? __fdividef(static_cast<float>(kBins), top - bottom) : 0.0f;
}

__device__ __forceinline__ uint64_t composite(const Entry& e, int32_t largest) {  // larger is better
  return static_cast<uint64_t>(key_of(__uint_as_float(e.value))) << 32 | (largest ? e.place : ~e.place);
}

template <class C>
__device__ __forceinline__ void count_in_bin(FilterShared<C::kBins>& s, const Entry& e, float top, float scale) {
  atomicAdd(&s.hist[bin_of<C::kBins>(__uint_as_float(e.value), top, scale)], 1u);
}

// Where the count reaches `need` among the row's candidates: their histogram's crossing bin. Follows tally().
template <class C>
__device__ __forceinline__ Found crossing_bin(const Candidates<C>& candidates, int entries, float top, float scale,
                                              int32_t need) {
  FilterShared<C::kBins>& s = candidates.s;
  if (C::kMulti) {
    candidates.each(entries, [&](const Entry& e) { count_in_bin<C>(s, e, top, scale); });
    __syncthreads();
  }
  const int32_t ranks[1] = {need};
  find_ranks<C::kThreads, C::kBins, 1>(s.hist, s.wa, s.found, ranks);
  return s.found[0];
}

// Marks a chosen candidate: its bit if it is this block's, else counts it if it lies in the blocks before.
template <class C>
struct Taker {
  uint32_t* bitmap;
  int32_t first, last;  // words of this block
  uint32_t lower;

  __device__ __forceinline__ void operator()(const Entry& e) {
    const uint32_t bit = bit_of<typename C::E>(e.place);
    const int32_t word = static_cast<int32_t>(bit >> 5);
    if (!C::kMulti || (word >= first && word < last)) {
      atomicOr(&bitmap[word - first], 1u << (bit & 31u));
    } else if (word < first) {
      ++lower;
    }
  }
};

// Takes the better bins and the best `need` (after them) of a crossing bin with at most kTieCap entries.
template <class C>
__device__ __forceinline__ void take_ranked(const Args& a, const Candidates<C>& candidates, int entries, float top,
                                            float scale, const Found& crossing, int32_t need, Taker<C>& take) {
  FilterShared<C::kBins>& s = candidates.s;
  candidates.each(entries, [&](const Entry& e) {
    const int32_t bin = bin_of<C::kBins>(__uint_as_float(e.value), top, scale);
    if (bin < crossing.bin) {
      take(e);
    } else if (bin == crossing.bin) {
      s.ties[atomicAdd(&s.tie_count, 1u)] = e;
    }
  });
  __syncthreads();
#pragma unroll 1
  for (int t = threadIdx.x; t < crossing.count; t += C::kThreads) {
    const Entry e = s.ties[t];
    const float x = __uint_as_float(e.value);
    int32_t better = 0;
#pragma unroll 1
    for (int i = 0; i < crossing.count; ++i) {
      const float y = __uint_as_float(s.ties[i].value);
      const uint32_t place = s.ties[i].place;
      better += y > x || (y == x && (a.largest ? place > e.place : place < e.place));
    }
    if (better < need) take(e);
  }
}

// The same for a crowded crossing bin: 8-bit digits of the composite key, from the top, give the last entry to take.
template <class C>
__device__ __forceinline__ void take_crowded(const Args& a, const Candidates<C>& candidates, int entries, float top,
                                             float scale, int32_t crossing, int32_t need, Taker<C>& take) {
  FilterShared<C::kBins>& s = candidates.s;
  uint64_t last = 0, mask = 0;
#pragma unroll 1
  for (int shift = 56; shift >= 0; shift -= 8) {
    __syncthreads();  // s.found was read
    candidates.each(entries, [&](const Entry& e) {
      if (bin_of<C::kBins>(__uint_as_float(e.value), top, scale) != crossing) return;
      const uint64_t key = composite(e, a.largest);
      if (((key ^ last) & mask) == 0) atomicAdd(&s.hist[255 - (static_cast<uint32_t>(key >> shift) & 255u)], 1u);
    });
    __syncthreads();
    const int32_t ranks[1] = {need};
    find_ranks<C::kThreads, C::kBins, 1>(s.hist, s.wa, s.found, ranks);
    const Found f = s.found[0];
    last |= static_cast<uint64_t>(255 - f.bin) << shift;
    mask |= static_cast<uint64_t>(255) << shift;
    need -= f.above;
    if (need == f.count) break;  // the whole digit is taken
  }
  candidates.each(entries, [&](const Entry& e) {
    const int32_t bin = bin_of<C::kBins>(__uint_as_float(e.value), top, scale);
    if (bin < crossing || (bin == crossing && composite(e, a.largest) >= last)) take(e);
  });
}

}  // namespace dsa
