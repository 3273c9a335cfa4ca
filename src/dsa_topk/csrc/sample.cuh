// A sample of the row gives a bracket of its k-th score.
#pragma once
#include "choose.cuh"

namespace dsa {

constexpr float kHuge = 1e37f;        // sampled values are clipped here so that differences stay finite
constexpr int32_t kMinSampled = 256;  // shorter windows go to the exact path

struct Bracket {
  float lo, hi;          // candidates: lo <= x <= hi
  float bin_lo, bin_hi;  // the same, finite: ends of the candidates' histogram
  Sight sight;

  __device__ __forceinline__ void set_bins(float bottom, float top) {  // ends of the sample
    bin_hi = hi < kHuge ? hi : top;
    bin_lo = lo > -kHuge ? lo : bottom;
  }
};

// Sampled values are clipped to finite floats: infinities at the ends, NaN with the lowest.
__device__ __forceinline__ float clip(float x) {
  return fminf(fmaxf(x, -kHuge), kHuge);  // fmaxf(NaN, y) is y
}

// Where the samples lie: in pieces of 64 bytes, on 64-byte boundaries (scattered 4-byte reads would fetch a whole DRAM
// atom each). Piece `g` of kPieces is jittered in the first quarter of the row; the other quarters have the same
// places.
template <class C>
struct SamplePieces {
  static constexpr int kLoad = C::E::kLoad, kPiece = 16 * kLoad, kAll = C::kThreads * C::kSamples / kPiece,
                       kPieces = kAll / 4;

  static __device__ __forceinline__ int32_t quarter(int32_t n) { return (n >> 2) & ~(kPiece - 1); }
  // Its first position, in a row with this shift (slice.cuh).
  static __device__ __forceinline__ int32_t start(uint32_t g, int32_t quarter, int32_t shift) {
    uint32_t h = g * 0x9E3779B1u;
    h = (h ^ (h >> 15)) * 0x85EBCA6Bu;
    const uint32_t fraction = g * (0xffffffffu / kPieces) + h / kPieces;
    const int32_t p = static_cast<int32_t>(__umulhi(fraction, static_cast<uint32_t>(quarter - kPiece + 1)));
    const int32_t aligned = ((p + shift) & ~(kPiece - 1)) - shift;
    return aligned < 0 ? aligned + kPiece : aligned;
  }
};

// Ranks in a sample of `samples` scores: where the row's k-th is expected, and the bracket's ends, `margin` standard
// deviations beside it.
struct SampleRanks {
  int32_t middle, lo, hi;

  __device__ __forceinline__ SampleRanks(int32_t samples, int32_t k, int32_t n, float margin) {
    const float share = __fdividef(static_cast<float>(k), static_cast<float>(n));
    const float rank = share * static_cast<float>(samples), sigma = ptx::sqrt_approx(rank * (1.0f - share));
    middle = static_cast<int32_t>(rank);
    lo = static_cast<int32_t>(rank + margin * sigma + 2.0f);
    hi = static_cast<int32_t>(rank - margin * sigma - 2.0f);
  }

  // As many samples as may lie inside the bracket if nothing is wrong with it.
  __device__ __forceinline__ int32_t most() const { return 2 * (lo - hi) + 8; }
  // Hardly more than the ranks ask for.
  __device__ __forceinline__ int32_t few() const { return lo - hi + (lo - hi) / 4; }
};

// The bracket that the sample shows. Where it must be looked at closer, the sample goes to `kept`. meanwhile(late) is
// called when the sample is asked for, and (late) when it has come.
template <class C, class F>
__device__ __forceinline__ Bracket sample_bracket(const Args& a, const Row<typename C::E>& row, int32_t shift,
                                                  FilterShared<C::kBins>& s, float* kept, F&& meanwhile) {
  constexpr int kThreads = C::kThreads, kBins = C::kBins, kN = C::kSamples;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  float v[kN];
  // Samples: a half warp loads pieces from the first quarter of the row, and the same places of the other quarters.
  using E = typename C::E;
  using Pieces = SamplePieces<C>;
  constexpr int kLoad = E::kLoad;
  const int32_t quarter = Pieces::quarter(row.n);
#pragma unroll
  for (int i = 0; i < kN; i += 4 * kLoad) {
    const auto g = static_cast<uint32_t>((i / (4 * kLoad) * kThreads + tid) >> 4);
    const int32_t p = Pieces::start(g, quarter, shift) + (tid & 15) * kLoad;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t x = ptx::ld_stream(reinterpret_cast<const uint32_t*>(row.window + p + q * quarter));
#pragma unroll
      for (int h = 0; h < kLoad; ++h) v[i + q * kLoad + h] = E::value(static_cast<typename E::Bits>(x >> 16 * h));
    }
  }
  meanwhile(false);
  for (int i = tid; i < kBins; i += kThreads) s.hist[i] = 0;
  if (tid == 0) {
    s.heavy = 0;
    s.tie_count = 0;
    s.spill_count = 0;
  }
  float top = -kHuge, bottom = kHuge;  // of the samples above the clipped lowest, which would stretch every bin
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    v[i] = clip(v[i]);
    top = fmaxf(top, v[i]);
    bottom = v[i] > -kHuge ? fminf(bottom, v[i]) : bottom;
  }
  const uint32_t warp_top = __reduce_max_sync(ptx::kFullMask, key_of(top)),
                 warp_bottom = __reduce_min_sync(ptx::kFullMask, key_of(bottom));
  if (lane == 0) {
    s.wb[warp] = warp_top;
    s.wc[warp] = warp_bottom;
  }
  __syncthreads();
  meanwhile(true);
  top = float_of(__reduce_max_sync(ptx::kFullMask, lane < C::kWarps ? s.wb[lane] : 0u));
  bottom = float_of(__reduce_min_sync(ptx::kFullMask, lane < C::kWarps ? s.wc[lane] : 0xffffffffu));
  if (tid == 0) {
    s.top = top;
    s.bottom = bottom;
  }

  constexpr int32_t kTotal = kThreads * kN;
  const SampleRanks rank(kTotal, a.k, row.n, a.margin);
  Bracket b;
  b.sight = top < bottom ? kLowest : kBlurred;  // nothing but the lowest, or one value, or:
  b.lo = b.hi = bottom;
  int32_t inside = kTotal;  // samples
  const float width = (top - bottom) * (1.0f / kBins);
  if (width > 0.0f) {
    const float scale = __fdividef(static_cast<float>(kBins), top - bottom);
#pragma unroll
    for (int i = 0; i < kN; ++i) {  // what lies below goes to a word behind the bins: a branch would cost more
      atomicAdd(&s.hist[v[i] >= bottom ? bin_of<kBins>(v[i], top, scale) : kBins], 1u);
    }
    __syncthreads();
    const int32_t ranks[2] = {rank.lo, rank.hi};
    find_ranks<kThreads, kBins, 2>(s.hist, s.wa, s.found, ranks);
    const Found lo = s.found[0], hi = s.found[1];
    b.lo = lo.bin < 0 ? -INFINITY : top - static_cast<float>(lo.bin + 1) * width;
    b.hi = hi.bin < 0 ? INFINITY : top - static_cast<float>(hi.bin) * width;
    inside = lo.bin < 0 ? 0 : lo.above + lo.count - (hi.bin < 0 ? 0 : hi.above);
    // Far more samples inside than the two ranks explain: outliers stretched the bins, or one value is heavy. Or the
    // bracket reaches into the clipped lowest: masks of -inf.
    b.sight = lo.bin >= 0 ? (inside > rank.most() ? kBlurred : kClear) : rank.lo <= kTotal ? kLowest : kClear;
  }
  b.set_bins(bottom, top);
  if (tid == 0) {
    s.sight = b.sight;
    s.inside = inside;
    s.lo = b.lo;
    s.hi = b.hi;
  }
  if (b.sight != kClear) {
#pragma unroll
    for (int i = 0; i < kN; ++i) kept[i * kThreads + tid] = v[i];
  }
  return b;
}

}  // namespace dsa
