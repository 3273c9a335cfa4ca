// The CUDA names that device code uses, for g++: include it before the kernels (csrc/ptx.cuh does under DSA_EMULATE).
//
// Standard headers must be included before this one: __noinline__ is a macro here, as in CUDA, and libstdc++ uses the
// same word inside an attribute.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu_launch.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define CPU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- vector types

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(4) ushort2 {
  unsigned short x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// ---- barriers and warp collectives

inline void __syncthreads(CPU_SITE) {
  cpu::block_barrier(0, 0, true, cpu::Reduce::none, false, "__syncthreads", file, line);
}
inline int __syncthreads_or(int p, CPU_SITE) {
  return static_cast<int>(cpu::block_barrier(0, 0, true, cpu::Reduce::any, p != 0, "__syncthreads_or", file, line));
}
inline int __syncthreads_and(int p, CPU_SITE) {
  return static_cast<int>(cpu::block_barrier(0, 0, true, cpu::Reduce::all, p != 0, "__syncthreads_and", file, line));
}
inline int __syncthreads_count(int p, CPU_SITE) {
  return static_cast<int>(
      cpu::block_barrier(0, 0, true, cpu::Reduce::count, p != 0, "__syncthreads_count", file, line));
}
inline void __syncwarp(unsigned mask = ~0u, CPU_SITE) { cpu::warp_meet(cpu::Op::sync, mask, 0, 0, file, line); }

// A mask of ~0u in a warp with fewer threads means those that exist, as on the hardware: live lanes only are waited
// for.
template <class T>
T __shfl_sync(unsigned mask, T v, int src, int width = 32, CPU_SITE) {
  const int lane = static_cast<int>(cpu::st.current->lane);
  return cpu::from_bits<T>(
      cpu::warp_meet(cpu::Op::shfl, mask, cpu::to_bits(v), (lane & ~(width - 1)) | (src & (width - 1)), file, line));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, CPU_SITE) {
  const int lane = static_cast<int>(cpu::st.current->lane), s = lane - static_cast<int>(d);
  return cpu::from_bits<T>(
      cpu::warp_meet(cpu::Op::shfl, mask, cpu::to_bits(v), s < (lane & ~(width - 1)) ? lane : s, file, line));
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, CPU_SITE) {
  const int lane = static_cast<int>(cpu::st.current->lane), s = lane + static_cast<int>(d);
  return cpu::from_bits<T>(
      cpu::warp_meet(cpu::Op::shfl, mask, cpu::to_bits(v), s > (lane | (width - 1)) ? lane : s, file, line));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32, CPU_SITE) {
  const int lane = static_cast<int>(cpu::st.current->lane), s = lane ^ x;
  return cpu::from_bits<T>(
      cpu::warp_meet(cpu::Op::shfl, mask, cpu::to_bits(v), s > (lane | (width - 1)) ? lane : s, file, line));
}
inline unsigned __ballot_sync(unsigned mask, int p, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::ballot, mask, p != 0, 0, file, line));
}
inline int __any_sync(unsigned mask, int p, CPU_SITE) {
  return cpu::warp_meet(cpu::Op::lor, mask, p != 0, 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int p, CPU_SITE) {
  return cpu::warp_meet(cpu::Op::land, mask, p != 0, 0, file, line) != 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::match_any, mask, cpu::to_bits(v), 0, file, line));
}
template <class T>
unsigned __match_all_sync(unsigned mask, T v, int* pred, CPU_SITE) {
  const auto r = static_cast<unsigned>(cpu::warp_meet(cpu::Op::match_all, mask, cpu::to_bits(v), 0, file, line));
  *pred = r != 0;
  return r;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::add, mask, v, 0, file, line));
}
inline int __reduce_add_sync(unsigned mask, int v, CPU_SITE) {
  return static_cast<int>(cpu::warp_meet(cpu::Op::add, mask, static_cast<unsigned>(v), 0, file, line));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::min_u, mask, v, 0, file, line));
}
inline int __reduce_min_sync(unsigned mask, int v, CPU_SITE) {
  return cpu::from_bits<int>(cpu::warp_meet(cpu::Op::min_s, mask, cpu::to_bits(v), 0, file, line));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::max_u, mask, v, 0, file, line));
}
inline int __reduce_max_sync(unsigned mask, int v, CPU_SITE) {
  return cpu::from_bits<int>(cpu::warp_meet(cpu::Op::max_s, mask, cpu::to_bits(v), 0, file, line));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::land, mask, v, 0, file, line));
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::lor, mask, v, 0, file, line));
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, CPU_SITE) {
  return static_cast<unsigned>(cpu::warp_meet(cpu::Op::lxor, mask, v, 0, file, line));
}

// ---- atomics: indivisible here because fibers switch only where we say; a switch before and after each is possible

namespace cpu {
template <class T, class F>
T atomic(T* p, F next) {
  atomic_point();
  ++st.stats.atomics;
  const T old = *p;
  *p = next(old);
  atomic_point();
  return old;
}
// The value argument takes part in no deduction, so that atomicAdd(unsigned*, 1) works as in CUDA.
template <class T>
struct identity {
  using type = T;
};
template <class T>
using same = typename identity<T>::type;
}  // namespace cpu
template <class T>
T atomicAdd(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(o) + static_cast<std::make_unsigned_t<T>>(v));
    else
      return static_cast<T>(o + v);
  });
}
template <class T>
T atomicSub(T* p, cpu::same<T> v) {
  return atomicAdd(p, static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(v)));
}
template <class T>
T atomicMax(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) { return o < v ? v : o; });
}
template <class T>
T atomicMin(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) { return v < o ? v : o; });
}
template <class T>
T atomicOr(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) { return static_cast<T>(o | v); });
}
template <class T>
T atomicAnd(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) { return static_cast<T>(o & v); });
}
template <class T>
T atomicXor(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) { return static_cast<T>(o ^ v); });
}
template <class T>
T atomicExch(T* p, cpu::same<T> v) {
  return cpu::atomic(p, [&](T) { return v; });
}
template <class T>
T atomicCAS(T* p, cpu::same<T> expected, cpu::same<T> v) {
  return cpu::atomic(p, [&](T o) { return o == expected ? v : o; });
}
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return cpu::atomic(p, [&](unsigned o) { return o >= limit ? 0u : o + 1; });
}
inline unsigned atomicDec(unsigned* p, unsigned limit) {
  return cpu::atomic(p, [&](unsigned o) { return o == 0 || o > limit ? limit : o - 1; });
}
inline void __threadfence() { cpu::point(); }
inline void __threadfence_block() { cpu::point(); }
inline void __threadfence_system() { cpu::point(); }
inline void __nanosleep(unsigned, CPU_SITE) { cpu::backoff(file, line); }

#include "cuda_math.h"

#undef CPU_SITE
