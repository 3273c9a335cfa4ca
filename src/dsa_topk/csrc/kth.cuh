// The exact k-th score of a row that is held in registers: which scores to take, ties included.
//
// One histogram of the scores above a cheap lower bound, in bins of equal width between it and the greatest score,
// shows the bin where the count reaches k; the few members of that bin are ranked all against all by (score, tie
// order). Crowded bins are looked at again in rounds over the scores' integer keys, each 2048 times finer, and at last
// over the positions of equal scores: at most five rounds for any row, none of which can lose a score.
#pragma once
#include "held.cuh"
#include "sample.cuh"

namespace dsa {

// Bins of equal width from `top` down to `low`, as floats above 2^23 whose low bits are the bin: a function that never
// rises with x, so that bins are ranges of scores. The last bin is what lies below `low`, NaN with it.
struct Bins {
  static constexpr float kBase = 8388608.0f;
  static constexpr int kFine = 2048, kRest = kFine - 1;
  float top, scale;

  __device__ __forceinline__ Bins(float low, float greatest) : top(greatest) {
    scale = __fdividef(static_cast<float>(kFine - 2), top - low);
  }
  // Whether bins can be made: finite ends, and not so close that the scale overflows.
  static __device__ __forceinline__ bool fit(float low, float top) {
    return low >= -kHuge && top <= kHuge && top - low > 1e-30f;
  }
  __device__ __forceinline__ float of(float x) const { return fminf(fmaf(top - x, scale, kBase), number(kRest)); }
  __device__ __forceinline__ float width() const { return __fdividef(1.0f, scale); }
  static __device__ __forceinline__ float number(int32_t bin) { return kBase + static_cast<float>(bin); }
};

struct alignas(16) KthShared {
  uint32_t wa[32], wb[32];  // one value a warp
  Found found[2];
  float score;             // Threshold::score on its way through slots_before (resident.cuh)
  Entry members[kTieCap];  // of the crossing bin: (score, place in position order)
  Entry last;              // the last one taken
  uint32_t cut;            // 1: scores equal to it are left out
  uint32_t member_count;
  uint64_t where;  // Row::where
  alignas(16) uint32_t hist[Bins::kFine];
};

// Scores to take: x > score, and of those equal to it the ones up to position `tie` in tie order.
struct Threshold {
  float score;
  bool cut;     // false: all that are equal
  int32_t tie;  // the last position taken
};

// A cheap lower bound of the k-th score that is hardly ever too high: the least of the greatest scores of groups so
// small that some of them have no score among the k best. With chance 1 - (1 - (1 - p)^g)^(n / g) for groups of g, p =
// k / n.
template <class C>
__device__ __forceinline__ void pilot(const float (&x)[C::kPer], int32_t n, int32_t k, float& low, float& top) {
  float half[2], least = x[0];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    half[h] = x[h * C::kPer / 2];
#pragma unroll
    for (int i = 1; i < C::kPer / 2; ++i) half[h] = fmaxf(half[h], x[h * C::kPer / 2 + i]);
  }
#pragma unroll
  for (int i = 1; i < C::kPer; ++i) least = fminf(least, x[i]);
  top = fmaxf(half[0], half[1]);
  const float others = 1.0f - __fdividef(static_cast<float>(k), static_cast<float>(n));
  float missed = others;  // chance that a group of kPer / 2 has none of the k best
#pragma unroll
  for (int g = 1; g < C::kPer / 2; g *= 2) missed *= missed;
  const float groups = static_cast<float>(n) * (2.0f / C::kPer);
  // Groups that are expected to have none: enough of them, and one will do.
  low = groups * 0.5f * missed * missed >= 24.0f        ? top
        : groups * missed >= 24.0f || !(least > -kHuge) ? fminf(half[0], half[1])
                                                        : least;
}

// The bins where the count of a complete histogram reaches each of `ranks`, which surely happens: s.found. Less work
// than find_ranks: sums are by warp until it is known where to look closely. Does not clear the histogram.
template <class C, int kRanks>
__device__ __forceinline__ void find_crossings(KthShared& s, const int32_t (&ranks)[kRanks]) {
  constexpr int kPer = Bins::kFine / C::kThreads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t h[kPer], sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    h[i] = s.hist[threadIdx.x * kPer + i];
    sum += h[i];
  }
  const uint32_t all = __reduce_add_sync(ptx::kFullMask, sum);
  if (lane == 0) s.wb[warp] = all;
  __syncthreads();
  const int32_t lower = static_cast<int32_t>(warp_sum_first(s.wb, warp, lane)),
                upper = lower + static_cast<int32_t>(all);
  bool here = false;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) here |= lower < ranks[r] && ranks[r] <= upper;
  if (here) {  // one warp a rank
    int32_t before = lower + static_cast<int32_t>(warp_inclusive_sum(sum, lane) - sum);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int32_t next = before + static_cast<int32_t>(h[i]);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (before < ranks[r] && ranks[r] <= next)
          s.found[r] = Found{static_cast<int32_t>(threadIdx.x * kPer + i), before, static_cast<int32_t>(h[i]), 0};
      }
      before = next;
    }
  }
  __syncthreads();
}

// Clears the bins that find_crossings has looked at; the same thread, so that no barrier is due between.
template <class C>
__device__ __forceinline__ void clear_bins(KthShared& s) {
  constexpr int kPer = Bins::kFine / C::kThreads;
#pragma unroll
  for (int i = 0; i < kPer; ++i) s.hist[threadIdx.x * kPer + i] = 0;
}

__device__ __forceinline__ Threshold threshold_of(const KthShared& s) {
  return Threshold{__uint_as_float(s.last.value), s.cut != 0, static_cast<int32_t>(s.last.place)};
}

// Finds the last of the best `need` among `count` listed scores, a warp a score and a lane each that it is compared
// with: s.last, and in s.cut whether equal ones are left out. A barrier is due before and after.
template <class C>
__device__ __forceinline__ void rank_members(KthShared& s, int32_t count, int32_t need, bool largest) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t flip = largest ? 0xffffffffu : 0u;  // smaller tags are better, flipped
#pragma unroll 1
  for (int m = warp; m < count; m += C::kWarps) {
    const Entry e = s.members[m];
    const float score = __uint_as_float(e.value);
    const uint32_t tag = e.place ^ flip;
    int32_t better = 0;
    uint32_t equal = 0;  // and worse by the tie order
#pragma unroll 1
    for (int i = lane; i - lane < count; i += 32) {
      const Entry o = s.members[i];  // beyond the list lies what it held before, or nothing
      const float other = i < count ? __uint_as_float(o.value) : Float32::value(Float32::kNaN);
      const uint32_t other_tag = o.place ^ flip;
      better += __popc(__ballot_sync(ptx::kFullMask, other > score || (other == score && other_tag < tag)));
      equal |= __ballot_sync(ptx::kFullMask, other == score && other_tag > tag);
    }
    if (better == need - 1 && lane == 0) {
      s.last = e;
      s.cut = equal != 0;
    }
  }
}

// Least and greatest key of the scores (no NaN) of a bin.
template <class C>
__device__ __forceinline__ void ends_of(KthShared& s, const float (&x)[C::kPer], const Bins& bins, int32_t number,
                                        uint32_t& low, uint32_t& high) {
  const float wanted = Bins::number(number);
  low = 0xffffffffu;
  high = 0;
#pragma unroll
  for (int i = 0; i < C::kPer; ++i) {
    if (bins.of(x[i]) == wanted && x[i] == x[i]) {
      const uint32_t key = key_of(x[i]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
  }
  block_ends<C::kWarps>(s.wa, s.wb, low, high);
  __syncthreads();
}

// The rounds by integer key.
template <class C>
struct Search {
  KthShared& s;
  const uint32_t (&key)[C::kPer];  // 0 where there is no score
  const Portion<C>& place;
  int32_t n, need;
  bool largest;

  // Counts the scores by bin(i), negative for none, and goes to the bin where the count reaches `need`, which becomes
  // the rank in that bin. A bin of -1: there are fewer.
  template <class F>
  __device__ __forceinline__ Found round(F&& bin) {
#pragma unroll
    for (int i = 0; i < C::kPer; ++i) {
      const int32_t b = bin(i);
      if (b >= 0) atomicAdd(&s.hist[b], 1u);
    }
    __syncthreads();
    const int32_t ranks[1] = {need};
    find_ranks<C::kThreads, Bins::kFine, 1>(s.hist, s.wa, s.found, ranks);
    const Found f = s.found[0];
    need -= f.bin < 0 ? 0 : f.above;
    return f;
  }

  // Lists the scores that `in` names, at most kTieCap of them, and takes the best `need`.
  template <class F>
  __device__ __forceinline__ Threshold among(int32_t count, F&& in) {
#pragma unroll
    for (int i = 0; i < C::kPer; ++i) {
      ptx::append(in(i), &s.member_count, s.members, __float_as_uint(float_of(key[i])),
                  static_cast<uint32_t>(place.of(i)));
    }
    __syncthreads();
    rank_members<C>(s, count, need, largest);
    __syncthreads();
    return threshold_of(s);
  }

  // The k-th score has a key in [low, high], as those of `crowd` scores do (-1: not known). False: there are not so
  // many scores, NaNs are among the best.
  __device__ __forceinline__ bool find(uint32_t low, uint32_t high, int32_t crowd, Threshold& t) {
#pragma unroll 1
    while (crowd < 0 || (crowd > kTieCap && low < high)) {
      if (high < low) return false;
      const uint32_t bits = 32u - static_cast<uint32_t>(__clz(static_cast<int32_t>(high - low))),
                     shift = bits > 11u ? bits - 11u : 0u;
      const Found f = round(
          [&](int i) { return key[i] >= low && key[i] <= high ? static_cast<int32_t>((high - key[i]) >> shift) : -1; });
      if (f.bin < 0) return false;
      high -= static_cast<uint32_t>(f.bin) << shift;
      const uint32_t span = (1u << shift) - 1u;
      low = high - low > span ? high - span : low;
      crowd = f.count;
      __syncthreads();  // everyone has read s.found
    }
    if (crowd <= kTieCap) {
      t = among(crowd, [&](int i) { return key[i] >= low && key[i] <= high; });
      return true;
    }
    // One score, too often: the place of the last copy to take, in steps of eight and then exactly.
    const Found f =
        round([&](int i) { return key[i] == low ? (largest ? n - 1 - place.of(i) : place.of(i)) >> 3 : -1; });
    const int32_t first = largest ? n - 8 - 8 * f.bin : 8 * f.bin;
    t = among(f.count, [&](int i) { return key[i] == low && place.of(i) >= first && place.of(i) < first + 8; });
    t.cut = true;  // copies elsewhere are left out
    return true;
  }
};

}  // namespace dsa
