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

  // `store`: this lane writes the unit's words, if they are words of the warp's.
  __device__ __forceinline__ void operator()(uint32_t x, uint32_t place, uint32_t& cursor, uint32_t* words,
                                             bool store) const {
    if constexpr (E::kLoad == 1) {
      const uint32_t ballot = ptx::filter_step<kStep>(E::value(x), lo, hi, place, cursor);
      if (store) *words = ballot;
    } else {
      uint2 ballots;
      ptx::filter_pair<E::kBFloat, kStep>(x, lo_pair, hi_pair, place, cursor, ballots.x, ballots.y);
      if (store) *reinterpret_cast<uint2*>(words) = ballots;
    }
  }
};

}  // namespace dsa
