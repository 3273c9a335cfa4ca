// Order of scores: one 32-bit key for every type, and the element types themselves.
//
// key(x) is monotone in contract order: NaN (0) < -inf < ... < -0 == +0 < ... < +inf. bfloat16 and float16 convert to
// float exactly and monotonically, so every type is compared in float32 and nothing is ever rounded.
#pragma once
#include "ptx.cuh"

namespace dsa {

__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 + 0 == +0
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return x != x ? 0u : key;
}

// The float with this key (keys of real scores only: never 0 and never inside the NaN ranges).
__device__ __forceinline__ float float_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The nearest keys of other scores; below +0 comes the first negative number, not -0.
__device__ __forceinline__ uint32_t key_above(uint32_t key) { return key + 1u; }
__device__ __forceinline__ uint32_t key_below(uint32_t key) { return key == 0x80000000u ? 0x7ffffffeu : key - 1u; }

constexpr uint32_t kKeyMinusInf = 0x007fffffu;  // ~bits(-inf)
constexpr uint32_t kKeyPlusInf = 0xff800000u;

// kLoad scores come with one 32-bit load. A threshold of a 16-bit type is rounded to where it parts the same scores:
// floor(x) for "above", ceil(x) for "at least".
struct Float32 {
  using Bits = uint32_t;
  static constexpr int kLoad = 1;
  static constexpr Bits kMinusInf = 0xff800000u, kNaN = 0x7fffffffu;
  static constexpr uint32_t kNaNs = kNaN;  // a load's worth
  static __device__ __forceinline__ float value(Bits b) { return __uint_as_float(b); }
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr int kLoad = 2;
  static constexpr bool kBFloat = true;
  static constexpr Bits kMinusInf = 0xff80u, kNaN = 0x7fffu;
  static constexpr uint32_t kNaNs = 0x7fff7fffu;
  static __device__ __forceinline__ float value(Bits b) { return __uint_as_float(static_cast<uint32_t>(b) << 16); }
  static __device__ __forceinline__ uint32_t ceil(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits + (bits >> 31 ? 0u : 0xffffu)) >> 16;
  }
  static __device__ __forceinline__ uint32_t floor(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits + (bits >> 31 ? 0xffffu : 0u)) >> 16;
  }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr int kLoad = 2;
  static constexpr bool kBFloat = false;
  static constexpr Bits kMinusInf = 0xfc00u, kNaN = 0x7fffu;
  static constexpr uint32_t kNaNs = 0x7fff7fffu;
  static __device__ __forceinline__ float value(Bits b) { return ptx::half_to_float(b); }
  static __device__ __forceinline__ uint32_t ceil(float x) { return ptx::half_up(x); }
  static __device__ __forceinline__ uint32_t floor(float x) { return ptx::half_down(x); }
};

}  // namespace dsa
