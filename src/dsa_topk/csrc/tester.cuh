// The test of a pass: where a score lies against the bracket.
#pragma once
#include "keys.cuh"

namespace dsa {

// What a lane does with one load of scores: the unit's words of the bitmap by ballots, and its candidates to the list.
template <class C>
struct Tester {
  using E = typename C::E;
  static constexpr int kStep = C::kThreads * 8;

  float lo, hi;               // Float32
  uint32_t lo_pair, hi_pair;  // 16-bit types: the rounded thresholds, twice

  __device__ __forceinline__ Tester(float low, float high) : lo(low), hi(high) {
    if constexpr (E::kLoad == 2) {
      lo_pair = E::ceil(low) * 0x10001u;
      hi_pair = E::floor(high) * 0x10001u;
    }
  }

  // The thresholds as floats: what lies between them is the same set of scores.
  __device__ __forceinline__ float low() const {
    if constexpr (E::kLoad == 2) return E::value(static_cast<typename E::Bits>(lo_pair));
    return lo;
  }
  __device__ __forceinline__ float high() const {
    if constexpr (E::kLoad == 2) return E::value(static_cast<typename E::Bits>(hi_pair));
    return hi;
  }

  // One load. `store`: this lane writes the unit's words, if they are words of the warp's.
  __device__ __forceinline__ void one(uint32_t x, uint32_t place, uint32_t& cursor, uint32_t* words, bool store) const {
    if constexpr (E::kLoad == 1) {
      const uint32_t ballot = ptx::filter_step<kStep>(E::value(x), lo, hi, place, cursor);
      if (store) *words = ballot;
    } else {
      uint2 ballots;
      ptx::filter_pair<E::kBFloat, kStep>(x, lo_pair, hi_pair, place, cursor, ballots.x, ballots.y);
      if (store) *reinterpret_cast<uint2*>(words) = ballots;
    }
  }

  // Four loads of neighbouring units of the warp, from number kFirst of its group on. 32-bit scores: this lane writes
  // the words of the first `stored` units. 16-bit scores: notes in `marks` which of the lane's own lie above the
  // bracket, the unit's lower scores in bit kFirst and the upper ones 16 bits higher; a ballot for each would cost
  // more.
  template <int kFirst>
  __device__ __forceinline__ void four(const uint32_t* x, uint32_t place, uint32_t& cursor, uint32_t* words, int stored,
                                       uint32_t& marks) const {
    constexpr int kPlaces = C::kThreads * E::kLoad;
    if constexpr (E::kLoad == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) one(x[i], place + i * kPlaces, cursor, words + i * C::kWarps, i < stored);
    } else {
      uint32_t above[4];
      ptx::filter_four_pairs<E::kBFloat, kStep, kPlaces>(x, lo_pair, hi_pair, place, cursor, above);
#pragma unroll
      for (int i = 0; i < 4; ++i) marks |= above[i] & (0x00010001u << (kFirst + i));
    }
  }
};

// A warp's 32 x 32 bits, a row a lane, transposed: at each distance the halves of the rows' parts change places.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x, int lane) {
  x = ptx::select_bytes(x, __shfl_xor_sync(ptx::kFullMask, x, 16), lane & 16 ? 0x3276u : 0x5410u);
  x = ptx::select_bytes(x, __shfl_xor_sync(ptx::kFullMask, x, 8), lane & 8 ? 0x3715u : 0x6240u);
#pragma unroll
  for (int d = 4; d; d >>= 1) {
    const uint32_t low = 0xffffffffu / ((1u << d) + 1u);  // the lower one of each pair of parts of d bits
    const bool upper = (lane & d) != 0;
    const uint32_t y = __shfl_xor_sync(ptx::kFullMask, x, d), turn = upper ? 32u - d : d;
    const uint32_t other = y << turn | y >> (32u - turn), keep = upper ? ~low : low;
    x = (x & keep) | (other & ~keep);
  }
  return x;
}

}  // namespace dsa
