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

// Whether tally() may leave it to crossing_bin to find too few candidates.
template <class C>
constexpr bool kMayLack = C::E::kLoad == 2;

// Where the count reaches `need` among the row's candidates: their histogram's crossing bin, -1 if they are too few
// (only where bins are exact: else tally() knows). Follows tally().
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
  Found crossing = s.found[0];
  if (kMayLack<C> && candidates.exact && crossing.bin > candidates.span)
    crossing.bin = -1;  // among what entries bring along
  return crossing;
}

// Marks a chosen candidate: its bit if it is this block's, else counts it if it lies in the blocks before.
template <class C>
struct Taker {
  uint32_t* bitmap;
  int32_t first, last;  // words of this block
  uint32_t lower;

  __device__ __forceinline__ void operator()(const Entry& e) {
    const int32_t word = static_cast<int32_t>(e.place >> 5);
    if (!C::kMulti || (word >= first && word < last)) {
      atomicOr(&bitmap[word - first], 1u << (e.place & 31u));
    } else if (word < first) {
      ++lower;
    }
  }
};

// Of `count` different keys, at most kTieCap and with zeros behind them, takes the `need` greatest: four lanes compare
// one of them with all.
template <class C, class Key, class F>
__device__ __forceinline__ void take_greatest(const Key* keys, int32_t count, int32_t need, F&& take) {
  const int part = threadIdx.x & 3;
#pragma unroll 1
  for (int32_t first = 0; first < count; first += C::kThreads / 4) {
    const int32_t t = first + static_cast<int32_t>(threadIdx.x >> 2);
    const Key key = keys[t < count ? t : 0];
    int32_t better = 0;
#pragma unroll 1
    for (int32_t i = 4 * part; i < count; i += 16) {
#pragma unroll
      for (int j = 0; j < 4; ++j) better += keys[i + j] > key;
    }
    __syncwarp();
    better += __shfl_xor_sync(ptx::kFullMask, better, 1);
    better += __shfl_xor_sync(ptx::kFullMask, better, 2);
    if (part == 0 && t < count && better < need) take(key);
  }
}

// Takes the better bins and the best `need` (after them) of a crossing bin with at most kTieCap entries.
template <class C>
__device__ __forceinline__ void take_ranked(const Args& a, const Candidates<C>& candidates, int entries, float top,
                                            float scale, const Found& crossing, int32_t need, Taker<C>& take) {
  FilterShared<C::kBins>& s = candidates.s;
  const auto tie = [&](const Entry& e) {  // find_ranks left zeros there
    s.ties[ptx::add_one_to(&s.tie_count)] = composite(e, a.largest);
  };
  if constexpr (C::kMulti || C::E::kLoad == 2) {
    candidates.each(entries, [&](const Entry& e) {
      const int32_t bin = bin_of<C::kBins>(__uint_as_float(e.value), top, scale);
      if (bin < crossing.bin) take(e);
      if (bin == crossing.bin) tie(e);
    });
  } else {
    // Without a branch: the bits of those that are not taken are none. True: it lies in the crossing bin.
    const auto look = [&](const Entry& e) {
      const int32_t bin = bin_of<C::kBins>(__uint_as_float(e.value), top, scale);
      atomicOr(&take.bitmap[e.place >> 5], (bin < crossing.bin ? 1u : 0u) << (e.place & 31u));
      return bin == crossing.bin;
    };
    candidates.each_two_entries(entries, [&](const Entry& first, const Entry& second, bool two) {
      const bool one_ties = look(first), other_ties = look(second) && two;
      if (one_ties || other_ties) {
        if (one_ties) tie(first);
        if (other_ties) tie(second);
      }
    });
  }
  __syncthreads();
  take_greatest<C>(s.ties, crossing.count, need, [&](uint64_t key) {
    const auto place = static_cast<uint32_t>(key);
    take(Entry{0u, a.largest ? place : ~place});
  });
}

// The same where each value has a bin of its own (Candidates::exact): the crossing bin's entries are equal. Scores
// above the bracket, which entries bring along, were taken before.
template <class C>
__device__ __forceinline__ void take_exactly(const Args& a, const Candidates<C>& candidates, int entries,
                                             const Found& crossing, int32_t need, uint32_t* bitmap) {
  using E = typename C::E;
  FilterShared<C::kBins>& s = candidates.s;
  auto* ties = reinterpret_cast<uint32_t*>(s.ties);
  const uint32_t value = candidates.value_of(crossing.bin) * 0x10001u;
  const auto look = [&](const Entry& e) {  // as above
    uint32_t above, equal;                 // all bits of a half
    ptx::compare_pair<E::kBFloat>(e.value, value, above, equal);
    const uint32_t two = above & 0x00020001u;
    atomicOr(&bitmap[e.place >> 5], ((two | two >> 16) & 3u) << (e.place & 31u));
    return equal;
  };
  candidates.each_two_entries(entries, [&](const Entry& first, const Entry& second, bool two) {
    const uint32_t one = look(first), either = look(second), other = two ? either : 0u;
    if ((one | other) == 0) return;
    const uint32_t flip = a.largest ? 0u : 0xffffffffu;
    const bool ties_here[4] = {(one & 1u) != 0, one >> 16 != 0, (other & 1u) != 0, other >> 16 != 0};
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += ties_here[i] ? 1u : 0u;
    uint32_t* to = ties + ptx::add_to(&s.tie_count, count);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (ties_here[i]) *to = ((i < 2 ? first.place : second.place) + (i & 1)) ^ flip;
      to += ties_here[i] ? 1 : 0;
    }
  });
  __syncthreads();
  take_greatest<C>(ties, crossing.count, need, [&](uint32_t key) {
    const uint32_t place = a.largest ? key : ~key;
    atomicOr(&bitmap[place >> 5], 1u << (place & 31u));
  });
}

template <class C>
__device__ __forceinline__ void take_best(const Args& a, const Candidates<C>& candidates, int entries, float top,
                                          float scale, const Found& crossing, int32_t need, Taker<C>& take) {
  if constexpr (C::E::kLoad == 2) {
    if (candidates.exact) return take_exactly<C>(a, candidates, entries, crossing, need, take.bitmap);
  }
  take_ranked<C>(a, candidates, entries, top, scale, crossing, need, take);
}

// The bin of a candidate, whichever kind the bins are.
template <class C>
__device__ __forceinline__ int32_t bin_in(const Candidates<C>& candidates, const Entry& e, float top, float scale) {
  const float x = __uint_as_float(e.value);
  if constexpr (C::E::kLoad == 2) {
    if (candidates.exact) return candidates.exact_bin(C::E::floor(x));
  }
  return bin_of<C::kBins>(x, top, scale);
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
      if (bin_in<C>(candidates, e, top, scale) != crossing) return;
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
    const int32_t bin = bin_in<C>(candidates, e, top, scale);
    if (bin < crossing || (bin == crossing && composite(e, a.largest) >= last)) take(e);
  });
}

}  // namespace dsa
