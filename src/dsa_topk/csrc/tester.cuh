// The test of a pass: where a score lies against the bracket.
#pragma once
#include "keys.cuh"

namespace dsa {

// The 16 low bits of x to the even bits.
__device__ __forceinline__ uint32_t spread_bits(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  x = (x | x << 2) & 0x33333333u;
  return (x | x << 1) & 0x55555555u;
}

// Where load number `load` of 16 has its two marks: the lower score's in the lower half, bits 0, 2 .. 14, 1, 3 .. 15.
__device__ __forceinline__ uint32_t mark_of(int load) { return 0x00010001u << (2 * (load & 7) + (load >> 3)); }

// A warp's marks, of 16 loads a lane, become words of the bitmap: lane l gets word l / 16 of unit l % 16. In steps: two
// bits of a mark's number, or one of these and one of the lane's, change places in all numbers.
__device__ __forceinline__ uint32_t words_of_marks(uint32_t x, int lane) {
  lane = ptx::opaque_number(lane);                     // else rare rows' steps keep all that follows from it
  const uint32_t moved = (x ^ x >> 15) & 0x0000aaaau;  // the half and the load's highest: 2 x load + half
  x ^= moved | moved << 15;
  x = ptx::select_bytes(x, __shfl_xor_sync(ptx::kFullMask, x, 8), lane & 8 ? 0x3276u : 0x5410u);
  x = ptx::select_bytes(x, __shfl_xor_sync(ptx::kFullMask, x, 4), lane & 4 ? 0x3715u : 0x6240u);
#pragma unroll
  for (int d = 4; d > 1; d >>= 1) {
    const uint32_t low = 0xffffffffu / ((1u << d) + 1u);  // the lower one of each pair of parts of d bits
    const bool upper = (lane & (d >> 1)) != 0;
    const uint32_t y = __shfl_xor_sync(ptx::kFullMask, x, d >> 1), turn = upper ? 32u - d : d;
    const uint32_t other = y << turn | y >> (32u - turn), keep = upper ? ~low : low;
    x = (x & keep) | (other & ~keep);
  }
  return x;
}

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
      uint32_t even, odd;
      ptx::filter_pair<E::kBFloat, kStep>(x, lo_pair, hi_pair, place, cursor, even, odd);
      if (store) {
        words[0] = spread_bits(even & 0xffffu) | spread_bits(odd & 0xffffu) << 1;
        words[1] = spread_bits(even >> 16) | spread_bits(odd >> 16) << 1;
      }
    }
  }

  // Four loads of neighbouring units of the warp, from number kFirst of its group on. 32-bit scores: this lane writes
  // the words of the first `stored` units. 16-bit scores: notes in `marks` which of the lane's own lie above the
  // bracket, for words_of_marks().
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
      for (int i = 0; i < 4; ++i) marks |= above[i] & mark_of(kFirst + i);
    }
  }
};

}  // namespace dsa
