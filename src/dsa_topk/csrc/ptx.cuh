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

// The blocks an SM that the kernels ask for are tuned on sm_90; other targets use a few registers more and get one of
// eight less, where the same bound would spill, and two where shared memory (100 KB an SM) leaves room for four anyway.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kFewerBlocks = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200 ? 2 : 1;
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

// A word that will be read again soon.
__device__ __forceinline__ uint32_t ld_keep(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// A word that another block of this launch has written.
__device__ __forceinline__ uint32_t ld_others(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Four neighbours at once, to be read again soon.
__device__ __forceinline__ void ld_keep_four(const uint32_t* p, uint32_t* v) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p));
}
__device__ __forceinline__ void ld_keep_four(const uint16_t* p, uint16_t* v) {
  asm volatile("ld.global.nc.v4.b16 {%0, %1, %2, %3}, [%4];" : "=h"(v[0]), "=h"(v[1]), "=h"(v[2]), "=h"(v[3]) : "l"(p));
}
// Four neighbours at once; the address is a multiple of their size.
__device__ __forceinline__ void ld_stream_four(const uint32_t* p, uint32_t* v) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(p));
}
__device__ __forceinline__ void ld_stream_four(const uint16_t* p, uint16_t* v) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b16 {%0, %1, %2, %3}, [%4];"
               : "=h"(v[0]), "=h"(v[1]), "=h"(v[2]), "=h"(v[3])
               : "l"(p));
}

// A word of global memory to shared memory, in the background; wait_copies() and a barrier end it.
__device__ __forceinline__ void copy_async(int32_t* to, const int32_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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
// The same without a fence over all of memory, which takes as long as a trip to it: orders nothing but the blocks.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// An mbarrier for what the cluster's blocks send each other: `count` arrivals, and their bytes. Ready for other blocks
// after the next cluster barrier.
__device__ __forceinline__ void barrier_init(unsigned long long* barrier, uint32_t count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Waits for the first phase.
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(barrier))
        : "memory");
  }
#endif
}
// Makes this thread's writes to shared memory visible to send().
__device__ __forceinline__ void fence_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Copies `bytes` (a multiple of 16) of shared memory to the place of `to` in block `rank` of the cluster, in the
// background, and arrives at its `barrier` with them. Nothing else of this thread becomes visible there, so that no
// fence is due.
__device__ __forceinline__ void send(uint32_t rank, void* to, const void* from, uint32_t bytes,
                                     unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .b32 to, bar;\n"
      " mapa.shared::cluster.u32 to, %0, %4;\n"
      " mapa.shared::cluster.u32 bar, %1, %4;\n"
      " mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [bar], %3;\n"
      " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%2], %3, [bar];\n}" ::"r"(
          smem_address(to)),
      "r"(smem_address(barrier)), "r"(smem_address(from)), "r"(bytes), "r"(rank)
      : "memory");
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
      : "=&r"(ballot), "+r"(cursor)
      : "f"(x), "f"(lo), "f"(hi), "r"(__float_as_uint(x)), "r"(tag), "n"(kStride)
      : "memory");
  return ballot;
}

// The same for a bracket around a value: its copies are neither appended nor above hi; `copies` gets their ballot.
template <int kStride>
__device__ __forceinline__ uint32_t filter_step_around(float x, float lo, float hi, float value, uint32_t tag,
                                                       uint32_t& cursor, uint32_t& copies) {
  uint32_t ballot;
  asm volatile(
      "{\n .reg .pred p, q, r;\n"
      " setp.gt.f32 p, %3, %5;\n"
      " vote.sync.ballot.b32 %0, p, 0xffffffff;\n"
      " setp.eq.f32 r, %3, %6;\n"
      " vote.sync.ballot.b32 %1, r, 0xffffffff;\n"
      " or.pred p, p, r;\n"
      " setp.ge.and.f32 q, %3, %4, !p;\n"
      " @q st.shared.v2.b32 [%2], {%7, %8};\n"
      " @q add.u32 %2, %2, %9;\n}"
      : "=&r"(ballot), "=&r"(copies), "+r"(cursor)
      : "f"(x), "f"(lo), "f"(hi), "f"(value), "r"(__float_as_uint(x)), "r"(tag), "n"(kStride)
      : "memory");
  return ballot;
}

// Adds 1 to a shared word.
__device__ __forceinline__ void count(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

// Adds to a count in shared memory and returns what it was. No meeting of lanes, which pays when many add, and which
// the compiler arranges where it knows what is added without end.
__device__ __forceinline__ uint32_t add_to(uint32_t* count, uint32_t more) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(smem_address(count)), "r"(more) : "memory");
  return before;
}
__device__ __forceinline__ uint32_t add_one_to(uint32_t* count) {
  uint32_t before;
  asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "r"(smem_address(count)) : "memory");
  return before;
}

// Where `in`, puts (value, tag) behind the `*count` entries of a list. Predicated; as C++ the warp would meet first,
// which pays when many lanes append.
__device__ __forceinline__ void append(bool in, uint32_t* count, void* list, uint32_t value, uint32_t tag) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .u32 at;\n"
      " setp.ne.u32 p, %0, 0;\n"
      " @p atom.shared.inc.u32 at, [%1], 0xffffffff;\n"
      " @p mad.lo.u32 at, at, 8, %2;\n"
      " @p st.shared.v2.b32 [at], {%3, %4};\n}" ::"r"(static_cast<uint32_t>(in)),
      "r"(smem_address(count)), "r"(smem_address(list)), "r"(value), "r"(tag)
      : "memory");
}

// Adds `more` to a count where x >= least.
__device__ __forceinline__ void add_at_least(uint32_t& count, float x, float least, uint32_t more) {
  asm("{\n .reg .pred p;\n setp.ge.f32 p, %1, %2;\n @p add.u32 %0, %0, %3;\n}"
      : "+r"(count)
      : "f"(x), "f"(least), "r"(more));
}

// Where x >= least, stores x at the shared address `cursor` and `value` kBefore bytes before it, and moves on.
template <uint32_t kBefore>
__device__ __forceinline__ void append_pair_at_least(uint32_t& cursor, float x, float least, uint32_t value) {
  asm volatile(
      "{\n .reg .pred p;\n"
      " setp.ge.f32 p, %1, %2;\n"
      " @p st.shared.b32 [%0], %4;\n"
      " @p st.shared.b32 [%0 + -%5], %3;\n"
      " @p add.u32 %0, %0, 4;\n}"
      : "+r"(cursor)
      : "f"(x), "f"(least), "r"(value), "r"(__float_as_uint(x)), "n"(kBefore)
      : "memory");
}

// Where x >= least, stores `value` at the shared address `cursor` and moves it on. Predicated like filter_step.
__device__ __forceinline__ void append_at_least(uint32_t& cursor, float x, float least, uint32_t value) {
  asm volatile(
      "{\n .reg .pred p;\n"
      " setp.ge.f32 p, %1, %2;\n"
      " @p st.shared.b32 [%0], %3;\n"
      " @p add.u32 %0, %0, 4;\n}"
      : "+r"(cursor)
      : "f"(x), "f"(least), "r"(value)
      : "memory");
}

// A lane's walk over its words of a bitmap in shared memory, from the last one down.
struct BitWalk {
  uint32_t word;   // bits that are left of the word at `from`
  uint32_t first;  // what bit 0 of it is stored as
  uint32_t from;   // shared address
  uint32_t at;     // shared address behind where the next one is stored
};

// Where the word is empty, moves to the one before it; then takes its three highest bits, or as many as it has, and
// stores each as first + its index, one in front of the other. Predicated like filter_step.
__device__ __forceinline__ void take_three_bits(BitWalk& w) {
#define DSA_TAKE                                                                                      \
  " setp.ne.u32 p, %0, 0;\n bfind.u32 high, %0;\n"                                                    \
  " bmsk.clamp.b32 lower, 0, high;\n and.b32 %0, %0, lower;\n" /* none: all ones, of an empty word */ \
  " add.u32 high, high, %1;\n @p st.shared.b32 [%3 + -4], high;\n @p add.u32 %3, %3, -4;\n"
  asm volatile(
      "{\n .reg .pred p;\n .reg .u32 high, lower;\n"
      " setp.eq.u32 p, %0, 0;\n"
      " @p add.u32 %2, %2, -4;\n @p ld.shared.b32 %0, [%2];\n @p add.u32 %1, %1, -32;\n" DSA_TAKE DSA_TAKE DSA_TAKE "}"
      : "+r"(w.word), "+r"(w.first), "+r"(w.from), "+r"(w.at)
      :
      : "memory");
#undef DSA_TAKE
}

// Four words from shared to global memory; both addresses are multiples of 16.
__device__ __forceinline__ void copy_four(int32_t* to, const uint32_t* from) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
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
      : "=&r"(even), "=&r"(odd), "+r"(cursor)                       \
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

// filter_pair for four loads, `kPlaces` apart, with masks instead of ballots: all bits of a half where its score is
// above hi.
template <bool kBFloat, int kStride, int kPlaces>
__device__ __forceinline__ void filter_four_pairs(const uint32_t* x, uint32_t lo, uint32_t hi, uint32_t tag,
                                                  uint32_t& cursor, uint32_t (&above)[4]) {
#if __CUDA_ARCH__ >= 900
#define DSA_FILTER(TYPE, ABOVE, X, TAG)     \
  " set.gt.u32." TYPE " " ABOVE ", " X      \
  ", %10;\n"                                \
  " set.ge.u32." TYPE " m, " X              \
  ", %9;\n"                                 \
  " setp.ne.u32 q, m, " ABOVE               \
  ";\n"                                     \
  " @q st.shared.v2.b32 [%4], {" X ", " TAG \
  "};\n"                                    \
  " @q add.u32 %4, %4, %12;\n"
#define DSA_FILTER_FOUR(TYPE) \
  asm volatile(                                                                                                       \
      "{\n .reg .pred q;\n .reg .b32 t, m;\n" DSA_FILTER(TYPE, "%0", "%5", "%11")                                    \
      " add.u32 t, %11, %13;\n" DSA_FILTER(TYPE, "%1", "%6", "t")                                                     \
      " add.u32 t, %11, %14;\n" DSA_FILTER(TYPE, "%2", "%7", "t")                                                     \
      " add.u32 t, %11, %15;\n" DSA_FILTER(TYPE, "%3", "%8", "t") "}"                                                 \
      : "=&r"(above[0]), "=&r"(above[1]), "=&r"(above[2]), "=&r"(above[3]), "+r"(cursor)                              \
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(lo), "r"(hi), "r"(tag), "n"(kStride), "n"(kPlaces),           \
        "n"(2 * kPlaces), "n"(3 * kPlaces)                                                                            \
      : "memory")
  if (kBFloat) {
    DSA_FILTER_FOUR("bf16x2");
  } else {
    DSA_FILTER_FOUR("f16x2");
  }
#undef DSA_FILTER_FOUR
#undef DSA_FILTER
#else
  const auto value = [](uint32_t h) { return kBFloat ? __uint_as_float(h << 16) : half_to_float(h & 0xffffu); };
  const float low = value(lo & 0xffffu), high = value(hi & 0xffffu);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x0 = value(x[i] & 0xffffu), x1 = value(x[i] >> 16);
    above[i] = (x0 > high ? 0xffffu : 0u) | (x1 > high ? 0xffff0000u : 0u);
    const bool in = (x0 >= low && !(x0 > high)) || (x1 >= low && !(x1 > high));
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %4, 0;\n"
        " @p st.shared.v2.b32 [%0], {%1, %2};\n @p add.u32 %0, %0, %3;\n}"
        : "+r"(cursor)
        : "r"(x[i]), "r"(tag + i * kPlaces), "n"(kStride), "r"(static_cast<uint32_t>(in))
        : "memory");
  }
#endif
}

// Two 16-bit scores against `pair`, which is the same one twice: all bits of a half where its score is above it, or
// equal.
template <bool kBFloat>
__device__ __forceinline__ void compare_pair(uint32_t x, uint32_t pair, uint32_t& above, uint32_t& equal) {
#if __CUDA_ARCH__ >= 900
  if (kBFloat) {
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(above) : "r"(x), "r"(pair));
    asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(equal) : "r"(x), "r"(pair));
  } else {
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(above) : "r"(x), "r"(pair));
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(equal) : "r"(x), "r"(pair));
  }
#else
  const auto value = [](uint32_t h) { return kBFloat ? __uint_as_float(h << 16) : half_to_float(h & 0xffffu); };
  const float first = value(x & 0xffffu), second = value(x >> 16), to = value(pair & 0xffffu);
  above = (first > to ? 0xffffu : 0u) | (second > to ? 0xffff0000u : 0u);
  equal = (first == to ? 0xffffu : 0u) | (second == to ? 0xffff0000u : 0u);
#endif
}

// Bytes of x (0 to 3) and y (4 to 7), chosen by the digits of `which` from the lowest one up.
__device__ __forceinline__ uint32_t select_bytes(uint32_t x, uint32_t y, uint32_t which) {
  return __byte_perm(x, y, which);
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

// The same of a number: what is made of it is made where it is used.
__device__ __forceinline__ int opaque_number(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Asks for the 64 bytes at `p`, a multiple of that, to come to L2.
__device__ __forceinline__ void prefetch_piece(const void* p) {
  asm volatile("prefetch.global.L2 [%0];\n prefetch.global.L2 [%0 + 32];" ::"l"(p));
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
inline uint32_t ld_keep(const uint32_t* p) {
  cpu::point();
  return *p;
}
inline void barrier_init(unsigned long long* barrier, uint32_t count) {
  cpu::mbarrier_init(reinterpret_cast<uint64_t*>(barrier), count);
}
inline void barrier_wait(unsigned long long* barrier) { cpu::mbarrier_wait(reinterpret_cast<uint64_t*>(barrier), 0); }
inline void fence_async() { cpu::point(); }
inline void send(uint32_t rank, void* to, const void* from, uint32_t bytes, unsigned long long* barrier) {
  uint64_t* bar = reinterpret_cast<uint64_t*>(cpu::map_shared(barrier, rank));
  cpu::mbarrier_arrive_expect_tx(bar, bytes);
  cpu::bulk_shared_to_cluster(cpu::map_shared(static_cast<uint8_t*>(to), rank), from, bytes, bar);
}
template <uint32_t kBefore>
inline void append_pair_at_least(uint32_t& cursor, float x, float least, uint32_t value) {
  if (!(x >= least)) return;
  *reinterpret_cast<uint32_t*>(dynamic_smem() + cursor) = __float_as_uint(x);
  *reinterpret_cast<uint32_t*>(dynamic_smem() + cursor - kBefore) = value;
  cursor += 4;
}
inline uint32_t ld_others(const uint32_t* p) {
  cpu::point();
  return *p;
}
template <class Bits>
inline void ld_stream_four(const Bits* p, Bits* v) {
  cpu::point();
  if (reinterpret_cast<uintptr_t>(p) % (4 * sizeof(Bits)) != 0) cpu::fail("a load of four scores is not aligned");
  for (int i = 0; i < 4; ++i) v[i] = p[i];
}
template <class Bits>
inline void ld_keep_four(const Bits* p, Bits* v) {
  ld_stream_four(p, v);
}
inline void copy_async(int32_t* to, const int32_t* from) { cpu::cp_async(to, from, 4); }
inline void wait_copies() { cpu::cp_async_wait_all(); }
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
inline void cluster_arrive_relaxed() { cpu::cluster_arrive(); }
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
template <int kStride>
inline uint32_t filter_step_around(float x, float lo, float hi, float value, uint32_t tag, uint32_t& cursor,
                                   uint32_t& copies) {
  copies = __ballot_sync(kFullMask, x == value);
  return filter_step<kStride>(x, x == value ? INFINITY : lo, hi, tag, cursor);
}
inline void count(uint32_t address) { atomicAdd(reinterpret_cast<uint32_t*>(dynamic_smem() + address), 1u); }
inline uint32_t add_to(uint32_t* count, uint32_t more) { return atomicAdd(count, more); }
inline uint32_t add_one_to(uint32_t* count) { return atomicAdd(count, 1u); }
struct BitWalk {
  uint32_t word, first, from, at;
};
inline void take_three_bits(BitWalk& w) {
  const auto word_at = [](uint32_t address) { return reinterpret_cast<uint32_t*>(dynamic_smem() + address); };
  if (w.word == 0) {
    w.from -= 4;
    w.first -= 32;
    w.word = *word_at(w.from);
  }
  for (int i = 0; i < 3 && w.word != 0; ++i) {
    const uint32_t high = 31 - __clz(w.word);
    w.word ^= 1u << high;
    w.at -= 4;
    *word_at(w.at) = w.first + high;
  }
}
inline void append(bool in, uint32_t* count, void* list, uint32_t value, uint32_t tag) {
  if (!in) return;
  uint32_t* slot = static_cast<uint32_t*>(list) + 2 * atomicAdd(count, 1u);
  slot[0] = value;
  slot[1] = tag;
}
inline void add_at_least(uint32_t& count, float x, float least, uint32_t more) {
  if (x >= least) count += more;
}
inline void append_at_least(uint32_t& cursor, float x, float least, uint32_t value) {
  if (!(x >= least)) return;
  *reinterpret_cast<uint32_t*>(dynamic_smem() + cursor) = value;
  cursor += 4;
}
inline void copy_four(int32_t* to, const uint32_t* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0)
    cpu::fail("a store of four words is not aligned");
  for (int i = 0; i < 4; ++i) to[i] = static_cast<int32_t>(from[i]);
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
template <bool kBFloat, int kStride, int kPlaces>
inline void filter_four_pairs(const uint32_t* x, uint32_t lo, uint32_t hi, uint32_t tag, uint32_t& cursor,
                              uint32_t (&above)[4]) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i) {
    uint32_t even, odd;
    filter_pair<kBFloat, kStride>(x[i], lo, hi, tag + i * kPlaces, cursor, even, odd);
    above[i] = (even >> lane & 1u) * 0xffffu | (odd >> lane & 1u) * 0xffff0000u;
  }
}
template <bool kBFloat>
inline void compare_pair(uint32_t x, uint32_t pair, uint32_t& above, uint32_t& equal) {
  const auto value = [](uint32_t h) {
    return kBFloat ? __uint_as_float((h & 0xffffu) << 16) : half_to_float(static_cast<uint16_t>(h));
  };
  const float first = value(x), second = value(x >> 16), to = value(pair);
  above = (first > to) * 0xffffu | (second > to) * 0xffff0000u;
  equal = (first == to) * 0xffffu | (second == to) * 0xffff0000u;
}
inline uint32_t select_bytes(uint32_t x, uint32_t y, uint32_t which) {
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = which >> 4 * i & 7u;
    bytes |= ((from < 4 ? x >> 8 * from : y >> 8 * (from - 4)) & 0xffu) << 8 * i;
  }
  return bytes;
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
inline int opaque_number(int x) { return x; }
inline void prefetch_l2(const void* p, uint32_t bytes) { cpu::bulk_prefetch(p, bytes); }
inline void prefetch_piece(const void* p) { cpu::bulk_prefetch(p, 64); }

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
