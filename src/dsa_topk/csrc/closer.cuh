// A closer look at a sample whose bracket came out too wide: one value is heavy, or outliers stretched the bins.
//
// A heavy value is taken or left as a whole: the bracket ends beside it if the k-th score is expected there; it lies
// around it, if there is room for a pass that marks its copies meanwhile and the k-th score may be one of them or not;
// else a plateau pass counts its copies. Then the bins are drawn anew over the samples that are left in the bracket.
#pragma once
#include "sample.cuh"

namespace dsa {

constexpr int32_t kNoRank = 0x7fffffff;  // in no bin
constexpr int kNear = 16;                // bins of the sample that a bracket may span and pass for narrow
constexpr int kHeavyLanes = 4;           // a value that so many lanes of a warp hold is heavy

// The heaviest value of the kept sample in [low, high], 0 if none is heavy. Counting it in bins would cost more: lanes
// that meet in a bin wait for each other.
template <class C>
__device__ __forceinline__ uint32_t heavy_key(const float* v, uint32_t low, uint32_t high, FilterShared<C::kBins>& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t heaviest = 0, count = 0;  // of the warp
#pragma unroll 2
  for (int i = 0; i < C::kSamples; i += 4) {
    const uint32_t x = key_of(v[i * C::kThreads]), key = x >= low && x <= high ? x : 0u;
    const uint32_t alike = __popc(__match_any_sync(ptx::kFullMask, key));
    const uint32_t most = __reduce_max_sync(ptx::kFullMask, key != 0 ? alike << 5 | lane : 0u);
    const uint32_t its = __shfl_sync(ptx::kFullMask, key, most & 31u);
    if (most >> 5 > count) {
      count = most >> 5;
      heaviest = its;
    }
  }
  if (lane == 0) {
    s.wb[warp] = count >= kHeavyLanes ? count : 0u;
    s.wc[warp] = heaviest;
  }
  __syncthreads();
  const uint32_t most = __reduce_max_sync(ptx::kFullMask, lane < C::kWarps ? s.wb[lane] << 5 | lane : 0u);
  return most >> 5 ? s.wc[most & 31u] : 0u;
}

// How many samples are better than the value with this key, and how many are copies of it.
struct Split {
  int32_t better, copies;
};
template <class C>
__device__ __forceinline__ Split split_sample(const float* v, uint32_t key, FilterShared<C::kBins>& s) {
  const int lane = threadIdx.x & 31;
  uint32_t counts = 0;  // better << 16 | copies
#pragma unroll 4
  for (int i = 0; i < C::kSamples; ++i) {
    const uint32_t x = key_of(v[i * C::kThreads]);
    counts += x > key ? 0x10000u : x == key ? 1u : 0u;
  }
  counts = __reduce_add_sync(ptx::kFullMask, counts);
  if (lane == 0) s.wa[threadIdx.x >> 5] = counts;
  __syncthreads();
  counts = warp_sum_first(s.wa, C::kWarps, lane);
  return Split{static_cast<int32_t>(counts >> 16), static_cast<int32_t>(counts & 0xffffu)};
}

// Ends, as keys, of the samples in [low, high] without the heavy ones; first > last if there are none.
struct Ends {
  uint32_t first, last;
};
template <class C>
__device__ __forceinline__ Ends sample_ends(const float* v, uint32_t low, uint32_t high, uint32_t heavy,
                                            FilterShared<C::kBins>& s) {
  Ends e{0xffffffffu, 0u};
#pragma unroll 4
  for (int i = 0; i < C::kSamples; ++i) {
    const uint32_t x = key_of(v[i * C::kThreads]);
    const bool in = x >= low && x <= high && x != heavy;
    if (in && x < e.first) e.first = x;
    if (in && x > e.last) e.last = x;
  }
  __syncthreads();  // the words were read
  block_ends<C::kWarps>(s.wb, s.wc, e.first, e.last);
  return e;
}

// Narrows [low, high] to the ranks' bins over the samples in `ends`: bins of equal widths, which the crowd in the
// middle fills evenly, or (by_key) of equal numbers of floats, which no spread defeats. The heavy ones are not counted.
// Returns the samples inside.
template <class C>
__device__ __forceinline__ int32_t narrow_by_bins(const float* v, const Ends& ends, uint32_t heavy, bool by_key,
                                                  uint32_t& low, uint32_t& high, FilterShared<C::kBins>& s) {
  constexpr int kBins = C::kBins, kInside = kBins - 1;  // bin 0: samples above
  int shift = 0;
  while (by_key && (ends.last - ends.first) >> shift > kInside - 1) ++shift;
  const float top = float_of(ends.last), width = (top - float_of(ends.first)) * (1.0f / kInside);
  const float scale = __fdividef(1.0f, width);
#pragma unroll 1
  for (int i = 0; i < C::kSamples; ++i) {
    const float x = v[i * C::kThreads];
    const uint32_t key = key_of(x);
    const uint32_t bin = by_key ? (ends.last - key) >> shift : static_cast<uint32_t>(bin_of<kInside>(x, top, scale));
    if (key >= ends.first && key != heavy) atomicAdd(&s.hist[key > ends.last ? 0u : bin + 1u], 1u);
  }
  __syncthreads();
  const int32_t ranks[2] = {s.rank_lo, s.rank_hi};
  find_ranks<C::kThreads, kBins, 2>(s.hist, s.wa, s.found, ranks);
  const Found lo = s.found[0], hi = s.found[1];
  if (hi.bin > 0) {
    const uint32_t edge = static_cast<uint32_t>(hi.bin - 1);
    high = by_key ? ends.last - (edge << shift) : key_of(top - static_cast<float>(edge) * width);
  }
  if (lo.bin > 0) {
    const uint32_t reach = by_key ? (static_cast<uint32_t>(lo.bin) << shift) - 1u : 0u;
    const uint32_t edge = by_key ? ends.last - ends.first > reach ? ends.last - reach : ends.first
                                 : key_of(top - static_cast<float>(lo.bin) * width);
    if (edge > low) low = edge;
  }
  if (lo.bin < 0) return 0;  // there is no more to narrow below
  return lo.above + lo.count - (hi.bin < 0 ? 0 : hi.bin == 0 ? hi.count : hi.above);
}

// Narrows the bracket [s.lo, s.hi] by the sample, `kept` in shared memory, and returns it in `b`, and how the row's
// pass is to be made: kHeavy: the k-th score is expected to be the heavy value, whose key goes to s.heavy; it does so
// too where the bracket ends beside it, or lies around it (kAround, if there is `room`).
template <class C>
__device__ __forceinline__ Step look_closer(Bracket& b, SampleRanks rank, const float* kept, bool room,
                                            FilterShared<C::kBins>& s) {
  const float* v = kept + threadIdx.x;  // v[i * kThreads]
  __syncthreads();                      // what thread 0 noted of the sample is there, and the warps' words were read
  uint32_t high = key_of(s.hi), low = key_of(s.lo);
  // Read before the next barrier: thread 0 may be the first to leave, and notes the new bracket there.
  const bool wide = (s.hi - s.lo) * (C::kBins / kNear) > s.top - s.bottom;
  bool wanted = true;
  Step pass = kPass;
  uint32_t around = 0, sampled = 0;  // the heavy value's key, should it lie inside, and that of its samples
  const int32_t few = rank.few();
  const uint32_t mode = s.sight == kLowest ? key_of(-kHuge) : heavy_key<C>(v, low, high, s);
  if (mode != 0) {
    const Split split = split_sample<C>(v, mode, s);
    // But for the copies they are few and close together: bins need not be drawn anew.
    wanted = wide || s.sight == kLowest || s.inside - split.copies > few;
    const int32_t better = split.better, as_good = split.better + split.copies;
    // Undo the clipping: the ends stand for the infinities (should it be NaN, the plateau pass will say so).
    uint32_t key = mode >= key_of(kHuge) ? kKeyPlusInf : mode <= key_of(-kHuge) ? kKeyMinusInf : mode;
    const bool above = rank.middle <= better, below = rank.middle > as_good;
    const bool lower = key_below(key) >= low;  // there may be scores between it and the bracket's end
    const bool from_above = rank.hi <= better, to_below = rank.lo > as_good && lower;
    if (room && key != kKeyPlusInf && rank.lo + 8 > better && rank.hi - 8 < as_good && (from_above || to_below)) {
      pass = kAround;
      around = key;
      sampled = mode;
      if (!from_above) {
        high = key_below(key);
        rank.hi = 0;
      }
      if (to_below) {
        rank.lo -= split.copies;
      } else {
        low = key_above(key);
        rank.lo = kNoRank;
      }
    } else {
      const bool plateau = above ? key == kKeyPlusInf : !below || key == kKeyMinusInf || !lower;
      if (plateau && below && !lower) key = kKeyMinusInf;  // with nothing sampled between the two
      if (plateau) pass = kHeavy;
      // The side that is wanted, or that would be if the plateau pass says so.
      if (plateau ? from_above && key != kKeyPlusInf : above) {
        low = key_above(key);
        if (rank.lo + 8 > better) rank.lo = kNoRank;  // all but down to the heavy value: all the way
      } else if (plateau ? rank.lo > as_good && key_below(key) >= low : below) {
        high = key_below(key);
        if (rank.hi - 8 < as_good) rank.hi = 0;
      } else {
        wanted = false;
      }
    }
    if (threadIdx.x == 0) s.heavy = key;
  }
  if (threadIdx.x == 0) {  // where registers are short
    s.rank_lo = rank.lo;
    s.rank_hi = rank.hi;
    s.rank_few = few;
  }
  Ends ends{low, low};
#pragma unroll 1
  for (int round = 0; wanted && round < 2; ++round) {
    ends = sample_ends<C>(v, low, high, sampled, s);
    wanted = ends.first < ends.last && narrow_by_bins<C>(v, ends, sampled, round == 1, low, high, s) > s.rank_few;
  }
  if (high < around) high = around;  // copies are not above the bracket
  b.lo = float_of(low);
  b.hi = float_of(high);
  b.set_bins(s.bottom, s.top);
  // Bins from the lowest sample on: the bracket may reach down to a mask.
  if (ends.first < ends.last && b.bin_lo < float_of(ends.first)) b.bin_lo = float_of(ends.first);
  return pass;
}

}  // namespace dsa
