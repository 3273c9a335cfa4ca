// A row held in the registers of one block: how it is shared out among the threads, and loaded.
//
// A warp owns kPer * 32 neighbouring scores, a thread kVectors groups of four of them: group j of lane l begins at
// score (warp * kVectors + j) * 128 + 4 * l of the row, less the misalignment of its start. So a warp's load is 512
// neighbouring bytes (256 for 16-bit scores), and order by position is order by (warp, group, lane, score).
#pragma once
#include "config.cuh"

namespace dsa {

// launch.h names the instantiations. The filter configuration it stands on is that of its way out, exact.cuh.
template <class Element, int Threads, int PerThread, int MinBlocks>
struct ResidentConfig : FilterConfig<Element, Threads, 8, 8, MinBlocks, false> {
  static constexpr int kPer = PerThread, kVectors = PerThread / 4, kChunk = PerThread * 32;
  static constexpr int kCapacity = Threads * PerThread;  // scores of a row, the misalignment of its start included
  static constexpr bool kShort = MinBlocks * Threads * (PerThread + 32) >= 65536;  // of registers: 32 beside the scores
  static constexpr bool kTight = Threads * (PerThread + 32) >= 65536;  // and no fewer blocks would give more
  static_assert(kPer % 8 == 0 && kPer <= 32, "a thread's choice is one 32-bit mask");
};

template <class C>
struct Portion {
  int32_t first;  // position of this thread's first score; negative before the window

  // `begin`: position of the block's first score, or what it would be, by the misalignment of the row's start.
  __device__ __forceinline__ explicit Portion(int32_t begin)
      : first(begin + static_cast<int32_t>((threadIdx.x >> 5) * C::kChunk + (threadIdx.x & 31u) * 4u)) {}
  __device__ __forceinline__ int32_t of(int i) const { return first + (i >> 2) * 128 + (i & 3); }  // of score i
  // Whether all scores of this warp lie in [0, n).
  __device__ __forceinline__ bool whole(int32_t n) const {
    const int32_t begin = first - static_cast<int32_t>(threadIdx.x & 31u) * 4;
    return begin >= 0 && begin + C::kChunk <= n;
  }
};

template <class E>
__device__ __forceinline__ int32_t vector_shift(const typename E::Bits* window) {
  return static_cast<int32_t>((reinterpret_cast<uint64_t>(window) / sizeof(typename E::Bits)) & 3u);
}

// Loads this thread's scores of a window of `room` scores; NaN where there are none.
template <class C>
__device__ __forceinline__ void hold(typename C::E::Bits (&b)[C::kPer], const typename C::E::Bits* window, int32_t room,
                                     const Portion<C>& place) {
  if (place.whole(room)) {
#pragma unroll
    for (int i = 0; i < C::kPer; i += 4) ptx::ld_stream_four(window + place.of(i), &b[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < C::kPer; i += 4) {
    const int32_t p = place.of(i);
    if (p >= 0 && p + 4 <= room) {
      ptx::ld_stream_four(window + p, &b[i]);
    } else {
#pragma unroll
      for (int d = 0; d < 4; ++d) b[i + d] = p + d >= 0 && p + d < room ? ptx::ld_stream(window + p + d) : C::E::kNaN;
    }
  }
}

// The scores before position n, NaN from there on.
template <class C>
__device__ __forceinline__ void cut(float (&x)[C::kPer], const typename C::E::Bits (&b)[C::kPer], int32_t n,
                                    const Portion<C>& place) {
#pragma unroll
  for (int i = 0; i < C::kPer; ++i) x[i] = C::E::value(b[i]);
  if (place.whole(n)) return;
#pragma unroll
  for (int i = 0; i < C::kPer; ++i) {
    if (place.of(i) >= n) x[i] = C::E::value(C::E::kNaN);
  }
}

}  // namespace dsa
