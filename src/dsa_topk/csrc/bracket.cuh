// A sample of a row, the same in every block of it, and the bracket of the row's k-th score that it shows (split.cuh).
#pragma once
#include "lists.cuh"

namespace dsa {

constexpr int32_t kMaxSplit = 1 << 30;  // longer rows go to the exact path: positions beyond a row's end stay positive

// Pieces of a row, 16 neighbouring scores each, from equal parts of it, at random in them; a thread has a group of four
// from each of several pieces. Scattered groups of four would fetch four times the memory. Scores have neighbours like
// them: pieces of 16 are worth 0.85 to 0.95 times as many scattered groups (docs/kernel-notes.md).
template <class C>
struct Sample {
  using Bits = typename C::E::Bits;
  static constexpr int kLongRow = 98304;  // scores from which on a larger sample pays: what is listed is less

  Bits scores[4 * C::kQuads];
  int32_t groups;  // of a thread: 1 or kQuads; the others are NaN
  float total;     // how many of all threads' scores count

  // Asks for the sample of a row of `n` scores. A row may be sampled before its length is known, as if it were as long
  // as it can be, and fit() follows.
  __device__ __forceinline__ void load(const Bits* window, int32_t n, int32_t shift) {
    groups = C::kQuads > 1 && n >= kLongRow ? C::kQuads : 1;
    total = static_cast<float>(4 * C::kThreads * groups);
#pragma unroll
    for (int q = 0; q < C::kQuads; ++q) {
      if (q < groups) {
        ptx::ld_keep_four(window + place(q, n, shift), &scores[4 * q]);
      } else {
#pragma unroll
        for (int d = 0; d < 4; ++d) scores[4 * q + d] = C::E::kNaN;
      }
    }
  }
  // The sample of the row's first n scores, from one of its first `sampled` scores: what lies beyond does not count,
  // or, if that is much, there is another one.
  __device__ __forceinline__ void fit(const Bits* window, int32_t n, int32_t sampled, int32_t shift) {
    if (n >= sampled) return;
    if (n < sampled - (sampled >> 2)) {
      load(window, n, shift);
      return;
    }
    total *= __fdividef(static_cast<float>(n), static_cast<float>(sampled));
#pragma unroll
    for (int q = 0; q < C::kQuads; ++q) {
      const int32_t p = place(q, sampled, shift);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (p + d >= n) scores[4 * q + d] = C::E::kNaN;
      }
    }
  }

 private:
  __device__ __forceinline__ int32_t place(int q, int32_t n, int32_t shift) const {
    constexpr uint32_t kSpan = 0xffffffffu / (C::kThreads / 4), kManySpan = 0xffffffffu / (C::kThreads * C::kQuads / 4);
    const uint32_t first = shift ? 1u : 0u,
                   whole = ((static_cast<uint32_t>(n) + static_cast<uint32_t>(shift)) >> 2) - first,
                   part = static_cast<uint32_t>(q * C::kThreads + threadIdx.x) >> 2,
                   span = groups > 1 ? kManySpan : kSpan;
    uint32_t h = part * 0x9E3779B1u;
    h = (h ^ (h >> 15)) * 0x85EBCA6Bu;
    uint32_t group = (first + __umulhi(part * span + __umulhi(h, span), whole - 3u)) & ~3u;
    group += (group < first ? 4u : 0u) + (threadIdx.x & 3u);
    return static_cast<int32_t>(4u * group) - shift;
  }
};

// The bracket of the row's k-th score: scores from `lo` on are to be listed, which is hardly ever above it; bins from
// shared.bottom to shared.top look for it, and what lies above these is hardly ever below it. False: the sample says
// nothing.
template <class C>
__device__ __forceinline__ bool bracket_of(const Args& a, SplitShared<C>& shared, const Sample<C>& sample, int32_t n,
                                           float& lo) {
  KthShared& s = shared.kth;
  constexpr int kN = 4 * C::kQuads;
  float v[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] = C::E::value(sample.scores[i]);
  float most = v[0], least = v[0];
#pragma unroll
  for (int i = 1; i < kN; ++i) {
    most = fmaxf(most, v[i]);
    least = fminf(least, v[i]);
  }
  const float share = __fdividef(static_cast<float>(a.k), static_cast<float>(n)), rank = share * sample.total,
              sigma = a.margin * ptx::sqrt_approx(rank * (1.0f - share)) + 2.0f;
  const int32_t ranks[2] = {static_cast<int32_t>(rank + sigma), static_cast<int32_t>(rank - sigma)};
  // As in kth.cuh's pilot, for the lower end of the bracket: groups are a thread's scores.
  float missed = 1.0f - __fdividef(rank + sigma, sample.total);
  const bool all = !(missed > 0.0f);  // nearly every score is wanted
#pragma unroll
  for (int g = 1; g < kN; g *= 2) {
    if (g < 4 * sample.groups) missed *= missed;
  }
  const float low = !all && missed * sample.total >= 96.0f * static_cast<float>(sample.groups) ? most : least;
  uint32_t low_key = low == low ? key_of(low) : 0xffffffffu, top_key = key_of(most);
  block_ends<C::kWarps>(s.wa, s.wb, low_key, top_key);
  float bottom = float_of(low_key), head = float_of(top_key);
  if (!Bins::fit(bottom, head)) return false;
  if (all) {
    if (threadIdx.x == 0) {
      shared.bottom = bottom;
      shared.top = head;
    }
    __syncthreads();  // the words of block_ends are used again
    lo = -INFINITY;
    return true;
  }
  if (threadIdx.x == 0) shared.head = head;  // not kept: registers are short
  const uint32_t base = ptx::smem_address(s.hist) - (__float_as_uint(Bins::kBase) << 2);
#pragma unroll 1
  for (int round = 0;; ++round) {
    const Bins bins(bottom, head);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (i < 4 * sample.groups) ptx::count(base + (__float_as_uint(fmaxf(bins.of(v[i]), Bins::kBase)) << 2));
    }
    __syncthreads();
    find_crossings<C>(s, ranks);
    if (s.found[0].bin == Bins::kRest) return false;
    clear_bins<C>(s);
    if (s.found[0].count <= C::kThreads / 8 * sample.groups || round == 3) break;
    // Many samples in one bin: masks or outliers stretched the range. Closer, with a bin to spare.
    const float width = bins.width(), next = head - static_cast<float>(s.found[0].bin + 2) * width;
    if (ranks[1] > 0) head -= static_cast<float>(s.found[1].bin) * width;
    bottom = next > bottom ? next : bottom;
    if (!Bins::fit(bottom, head)) return false;
    __syncthreads();  // the bins are cleared, s.found was read
  }
  const float width = Bins(bottom, head).width();
  lo = head - static_cast<float>(s.found[0].bin + 1) * width;
  if (threadIdx.x == 0) {
    const float hi = ranks[1] > 0 ? head - static_cast<float>(s.found[1].bin) * width : INFINITY;
    float top = shared.head;
    // Of a row much longer than its sample many scores may lie above all sampled ones, as far again as these reach.
    if (hi > top) top += top - lo;
    shared.bottom = lo;
    shared.top = hi < top ? hi : top;
  }
  return true;
}

}  // namespace dsa
