// A closer look at a sample whose bracket came out too wide: outliers stretched the bins, or one value is heavy.
//
// Bins of equal numbers of floats are not stretched by outliers, and three rounds of them come down to a few
// neighbouring floats. A value that is heavy even then is taken or left as a whole: the bracket ends beside it if the
// k-th score is expected there, else a plateau pass counts its copies.
#pragma once
#include "sample.cuh"

namespace dsa {

// Narrows the bracket [s.lo, s.hi] by the sample, `kept` in shared memory, and returns it in `b`. True: the k-th score
// is expected to be the heavy value, whose key goes to s.heavy; it does so too where the bracket ends beside it.
template <class C>
__device__ __forceinline__ bool look_closer(Bracket& b, const SampleRanks& rank, const float* kept,
                                            FilterShared<C::kBins>& s) {
  constexpr int kThreads = C::kThreads, kBins = C::kBins, kN = C::kSamples;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const float* v = kept + tid;  // v[i * kThreads]
  __syncthreads();              // what thread 0 noted of the sample is there, and the warps' words were read
  const bool lowest = s.sight == kLowest;
  uint32_t high = key_of(s.hi), low = key_of(s.lo);
  bool lost = false;  // the lower rank lies below every sample that is not the lowest
#pragma unroll 1
  for (int round = 0; round < 3 && !lowest; ++round) {
    int shift = 0;
    while ((high - low) >> shift > kBins - 2) ++shift;
#pragma unroll 1
    for (int i = 0; i < kN; ++i) {
      const uint32_t key = key_of(v[i * kThreads]);
      if (key >= low) atomicAdd(&s.hist[key > high ? 0u : ((high - key) >> shift) + 1u], 1u);
    }
    __syncthreads();
    const int32_t ranks[2] = {rank.lo, rank.hi};
    find_ranks<kThreads, kBins, 2>(s.hist, s.wa, s.found, ranks);
    const Found lo = s.found[0], hi = s.found[1];
    lost = lo.bin < 0;
    if (lost) break;
    const uint32_t start = high;
    if (hi.bin > 0) high = start - (static_cast<uint32_t>(hi.bin - 1) << shift);
    if (lo.bin > 0) {
      const uint32_t reach = (static_cast<uint32_t>(lo.bin) << shift) - 1u;
      if (start - low > reach) low = start - reach;
    }
    const int32_t outside = hi.bin < 0 ? 0 : hi.bin == 0 ? hi.count : hi.above;
    // A bracket that could be narrower costs candidates; a round costs less.
    if (lo.above + lo.count - outside <= (round == 2 ? rank.most() : rank.few())) {
      b.lo = float_of(low);
      b.hi = float_of(high);
      b.set_bins(s.bottom, s.top);
      return false;
    }
  }
  float heavy = -kHuge;
  if (!lowest) {  // the heaviest value of the bracket, over all warps
#pragma unroll 1
    for (int i = 0; i < kN; i += 4) {
      const uint32_t key = key_of(v[i * kThreads]);
      const bool in = key >= low && key <= high;
      const uint32_t alike = __popc(__match_any_sync(ptx::kFullMask, in ? key : 0u));  // by every lane, in no branch
      const uint32_t count = in ? alike : 0u;
      const uint32_t most = __reduce_max_sync(ptx::kFullMask, count << 5 | lane);
      if (lane == static_cast<int>(most & 31u) && count)
        atomicMax(&s.mode, static_cast<unsigned long long>(count) << 32 | key);
    }
    __syncthreads();
    if (s.mode != 0) heavy = float_of(static_cast<uint32_t>(s.mode));
  }
  uint32_t counts = 0;  // samples better than it << 16 | copies of it
  uint32_t next = key_of(kHuge), last = key_of(-kHuge);
#pragma unroll 1
  for (int i = 0; i < kN; ++i) {
    const float x = v[i * kThreads];
    const uint32_t key = key_of(x);
    counts += x > heavy ? 0x10000u : x == heavy ? 1u : 0u;
    if (x > heavy && key < next) next = key;
    if (x < heavy && key > last) last = key;
  }
  counts = __reduce_add_sync(ptx::kFullMask, counts);
  next = __reduce_min_sync(ptx::kFullMask, next);
  last = __reduce_max_sync(ptx::kFullMask, last);
  if (lane == 0) {
    s.wa[warp] = counts;
    s.wb[warp] = next;
    s.wc[warp] = last;
  }
  __syncthreads();
  counts = warp_sum_first(s.wa, C::kWarps, lane);
  const int32_t better = static_cast<int32_t>(counts >> 16), copies = static_cast<int32_t>(counts & 0xffffu);
  // Undo the clipping: the ends stand for the infinities (should it be NaN, the plateau pass will say so).
  uint32_t key = heavy >= kHuge ? kKeyPlusInf : heavy <= -kHuge ? kKeyMinusInf : key_of(heavy);
  const bool below = rank.middle > better + copies;
  if (below && lost) key = kKeyMinusInf;  // with nothing sampled between the two
  if (tid == 0) s.heavy = key;
  const bool above = rank.middle <= better && key != kKeyPlusInf;
  const bool beside = above || (below && key != kKeyMinusInf);
  b.lo = float_of(above ? key_above(key) : low);
  b.hi = float_of(beside && !above ? key_below(key) : high);
  b.set_bins(s.bottom, s.top);
  // Bins not from the heavy value on, which may be a mask far away.
  if (above) b.bin_lo = float_of(__reduce_min_sync(ptx::kFullMask, lane < C::kWarps ? s.wb[lane] : 0xffffffffu));
  if (beside && !above) b.bin_hi = float_of(__reduce_max_sync(ptx::kFullMask, lane < C::kWarps ? s.wc[lane] : 0u));
  return !beside;
}

}  // namespace dsa
