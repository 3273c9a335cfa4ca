// Every instruction that CUDA C++ has no name for, one wrapper each, and the CPU emulator's stand-ins.
// The only file with inline assembly or an #ifdef: kernel bodies are the same text on the GPU and in the emulator.
#pragma once
#include <stdint.h>

#ifdef DSA_EMULATE
#include "cuda_cpu.h"
#endif

namespace dsa {
namespace ptx {

constexpr uint32_t kFullMask = 0xffffffffu;

#ifndef DSA_EMULATE

// The blocks an SM that the kernels ask for are tuned on sm_90; other targets use a few registers more and get one
// block less, where the same bound would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kFewerBlocks = 1;
#else
constexpr int kFewerBlocks = 0;
#endif

__device__ __forceinline__ uint8_t* dynamic_smem() {
  extern __shared__ __align__(128) uint8_t dsa_dynamic_smem[];
  return dsa_dynamic_smem;
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Streaming read-only load: the row is read once, so it need not stay in L1.
__device__ __forceinline__ uint32_t ld_stream(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint16_t ld_stream(const uint16_t* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.b16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ float half_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ __forceinline__ float sqrt_approx(float x) {
  float r;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Programmatic dependent launch (sm_90 and later; elsewhere launches are never programmatic).
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The same object in the shared memory of another block of the cluster.
template <class T>
__device__ __forceinline__ T* map_shared(T* p, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t r;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
  return reinterpret_cast<T*>(r);
#else
  return p;
#endif
}

// One step of the stream filter for one score a lane: returns the warp's ballot of x > hi; where lo <= x <= hi, appends
// (x, tag) at *cursor and moves the cursor by kStride bytes. NaN passes neither test. Predicated by hand: as C++ the
// compiler branches around the store, which costs a third of the stream (docs/kernel-notes.md).
template <int kStride>
__device__ __forceinline__ uint32_t filter_step(float x, float lo, float hi, uint32_t tag, uint32_t& cursor) {
  uint32_t ballot;
  asm volatile(
      "{\n .reg .pred p, q;\n"
      " setp.gt.f32 p, %2, %4;\n"
      " vote.sync.ballot.b32 %0, p, 0xffffffff;\n"
      " setp.ge.and.f32 q, %2, %3, !p;\n"
      " @q st.shared.v2.b32 [%1], {%5, %6};\n"
      " @q add.u32 %1, %1, %7;\n}"
      : "=r"(ballot), "+r"(cursor)
      : "f"(x), "f"(lo), "f"(hi), "r"(__float_as_uint(x)), "r"(tag), "n"(kStride)
      : "memory");
  return ballot;
}

// The same for two 16-bit scores a lane, the lower half first: `even` and `odd` get the ballots of the lower and the
// upper scores above hi. Where either lies in the bracket, both are appended as they came; whoever reads them tests
// again.
template <bool kBFloat, int kStride>
__device__ __forceinline__ void filter_pair(uint32_t x, uint32_t lo, uint32_t hi, uint32_t tag, uint32_t& cursor,
                                            uint32_t& even, uint32_t& odd) {
#if __CUDA_ARCH__ >= 900
#define DSA_FILTER_PAIR(TYPE)                                       \
  asm volatile(                                                     \
      "{\n .reg .pred p, q, r, t;\n"                                \
      " setp.gt." TYPE                                              \
      " p|q, %3, %5;\n"                                             \
      " vote.sync.ballot.b32 %0, p, 0xffffffff;\n"                  \
      " vote.sync.ballot.b32 %1, q, 0xffffffff;\n"                  \
      " setp.ge." TYPE                                              \
      " r|t, %3, %4;\n"                                             \
      " xor.pred r, r, p;\n xor.pred t, t, q;\n or.pred r, r, t;\n" \
      " @r st.shared.v2.b32 [%2], {%3, %6};\n"                      \
      " @r add.u32 %2, %2, %7;\n}"                                  \
      : "=r"(even), "=r"(odd), "+r"(cursor)                         \
      : "r"(x), "r"(lo), "r"(hi), "r"(tag), "n"(kStride)            \
      : "memory")
  if (kBFloat) {
    DSA_FILTER_PAIR("bf16x2");
  } else {
    DSA_FILTER_PAIR("f16x2");
  }
#undef DSA_FILTER_PAIR
#else
  const auto value = [](uint32_t h) { return kBFloat ? __uint_as_float(h << 16) : half_to_float(h & 0xffffu); };
  const float x0 = value(x & 0xffffu), x1 = value(x >> 16), low = value(lo & 0xffffu), high = value(hi & 0xffffu);
  even = __ballot_sync(kFullMask, x0 > high);
  odd = __ballot_sync(kFullMask, x1 > high);
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " @p st.shared.v2.b32 [%0], {%1, %2};\n @p add.u32 %0, %0, %3;\n}"
      : "+r"(cursor)
      : "r"(x), "r"(tag), "n"(kStride), "n"(0),
        "r"(static_cast<uint32_t>((x0 >= low && !(x0 > high)) || (x1 >= low && !(x1 > high))))
      : "memory");
#endif
}

// The nearest float16 that is not below (above) x.
__device__ __forceinline__ uint32_t half_up(float x) {
  uint16_t h;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
__device__ __forceinline__ uint32_t half_down(float x) {
  uint16_t h;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

// The same pointer, of which the compiler knows nothing: what is read through it is not kept from one use to the next.
template <class T>
__device__ __forceinline__ const T& opaque(const T& x) {
  const T* p = &x;
  asm volatile("" : "+l"(p));
  return *p;
}

// Asks for the next `bytes` (a multiple of 16) of global memory at `p` (16-byte aligned) to come to L2.
__device__ __forceinline__ void prefetch_l2(const void* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

#else  // DSA_EMULATE

constexpr int kFewerBlocks = 0;

inline uint8_t* dynamic_smem() { return static_cast<uint8_t*>(cpu::dynamic_smem()); }
// The emulator's "shared address" is an offset into the block's dynamic shared memory.
inline uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - dynamic_smem());
}
inline uint32_t ld_stream(const uint32_t* p) {
  cpu::point();
  return *p;
}
inline uint16_t ld_stream(const uint16_t* p) {
  cpu::point();
  return *p;
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112u) << 23 | mantissa << 13);
  const float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -f : f;
}
inline float sqrt_approx(float x) { return cpu::sqrt_approx(x); }
inline void pdl_launch_dependents() { cpu::pdl_launch_dependents(); }
inline void pdl_wait() { cpu::pdl_wait(); }
inline uint32_t cluster_rank() { return cpu::cluster_rank(); }
inline void cluster_arrive() { cpu::cluster_arrive(); }
inline void cluster_wait() { cpu::cluster_wait(); }
template <class T>
inline T* map_shared(T* p, uint32_t rank) {
  return static_cast<T*>(cpu::map_shared(p, rank));
}
template <int kStride>
inline uint32_t filter_step(float x, float lo, float hi, uint32_t tag, uint32_t& cursor) {
  const bool above = x > hi;
  const uint32_t ballot = __ballot_sync(kFullMask, above);
  if (!above && x >= lo) {
    uint32_t* slot = reinterpret_cast<uint32_t*>(dynamic_smem() + cursor);
    slot[0] = __float_as_uint(x);
    slot[1] = tag;
    cursor += kStride;
  }
  return ballot;
}
template <bool kBFloat, int kStride>
inline void filter_pair(uint32_t x, uint32_t lo, uint32_t hi, uint32_t tag, uint32_t& cursor, uint32_t& even,
                        uint32_t& odd) {
  const auto value = [](uint32_t h) {
    return kBFloat ? __uint_as_float((h & 0xffffu) << 16) : half_to_float(static_cast<uint16_t>(h));
  };
  const float x0 = value(x), x1 = value(x >> 16), low = value(lo), high = value(hi);
  even = __ballot_sync(kFullMask, x0 > high);
  odd = __ballot_sync(kFullMask, x1 > high);
  if ((x0 >= low) != (x0 > high) || (x1 >= low) != (x1 > high)) {
    uint32_t* slot = reinterpret_cast<uint32_t*>(dynamic_smem() + cursor);
    slot[0] = x;
    slot[1] = tag;
    cursor += kStride;
  }
}
// The largest float16 in magnitude that is not beyond x, and the next one where that is to be passed.
inline uint32_t half_toward(float x, bool away) {
  const uint32_t sign = x < 0.0f ? 0x8000u : 0u;
  const float size = x < 0.0f ? -x : x;
  uint32_t low = 0, high = 0x7c00u;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (half_to_float(static_cast<uint16_t>(middle)) <= size) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return sign | (away && half_to_float(static_cast<uint16_t>(low)) < size ? low + 1 : low);
}
inline uint32_t half_up(float x) { return half_toward(x, x > 0.0f); }
inline uint32_t half_down(float x) { return half_toward(x, x < 0.0f); }
template <class T>
inline const T& opaque(const T& x) {
  return x;
}
inline void prefetch_l2(const void*, uint32_t) {}

#endif  // DSA_EMULATE

// Barrier over all blocks of a row: the cluster's, or the block's own where a row has one block.
template <bool kMulti>
__device__ __forceinline__ void row_sync() {
  if (kMulti) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace ptx
}  // namespace dsa
