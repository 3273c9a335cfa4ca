// Which instantiation runs: the list of kernels and the shared memory each launch needs. Host code shared by the
// binding (module.cu) and the CPU emulator; the choice among the kernels is made in Python (_plan.py), which names one
// by its number.
#pragma once
#include "filter.cuh"
#include "order.cuh"

namespace dsa {

// Threads, samples a thread, list entries a thread, blocks an SM, several blocks a row.
template <class E>
using Row128 = FilterConfig<E, 128, 8, 8, 8, false>;
template <class E>
using Row128Deep = FilterConfig<E, 128, 16, 8, 8, false>;
template <class E>
using Row256 = FilterConfig<E, 256, 16, 8, 4, false>;
template <class E>
using Row512 = FilterConfig<E, 512, 8, 8, 2, false>;
template <class E>
using Row512Deep = FilterConfig<E, 512, 16, 8, 2, false>;
template <class E>
using Cluster512 = FilterConfig<E, 512, 8, 8, 1, true>;
template <class E>
using Cluster512Deep = FilterConfig<E, 512, 16, 8, 1, true>;

// _plan.py has the same table: it chooses by samples and list capacity.
enum Kernel : int32_t {
  kRow128 = 0,
  kRow128Deep = 1,
  kRow256 = 2,
  kRow512 = 3,
  kRow512Deep = 4,
  kCluster512 = 5,
  kCluster512Deep = 6,
  kKernels = 7
};

struct LaunchShape {
  int32_t threads, cluster, smem_bytes;
  int64_t blocks;
};

constexpr int32_t kMaxSmem = 227 * 1024;  // what sm_90 and sm_100 give a block; others have less

// Fills the launch-dependent fields of `a` for a filter kernel and says how to launch it on a device that gives a block
// `smem_limit` bytes of shared memory.
template <class C>
inline LaunchShape filter_shape(Args& a, int32_t cluster, int32_t smem_limit = kMaxSmem) {
  constexpr int64_t kUnit = 32 * C::E::kLoad;
  const int64_t units = (static_cast<int64_t>(a.width) + 2 * kUnit - 2) / kUnit;  // whatever the window's start
  a.cluster = C::kMulti ? cluster : 1;
  a.region_cap = C::kMulti ? (cluster > 8 ? 1024 : 2048) : 0;
  const int64_t slice = (units + a.cluster - 1) / a.cluster * C::E::kLoad;
  const int32_t arena = C::kArenaBytes + a.cluster * a.region_cap * 8;
  a.arena_bytes = (arena + 127) / 128 * 128;
  const int32_t fixed = static_cast<int32_t>(sizeof(FilterShared<C::kBins>)) + a.arena_bytes;
  // A row whose slices need more bitmap than there is takes the exact path; shorter rows of a wide buffer do not.
  const int64_t wanted = (slice + 3) / 4 * 4, room = smem_limit > fixed ? (smem_limit - fixed) / 16 * 4 : 0;
  a.bitmap_words = static_cast<int32_t>(wanted < room ? wanted : room);
  return LaunchShape{C::kThreads, a.cluster, fixed + a.bitmap_words * 4, static_cast<int64_t>(a.rows) * a.cluster};
}

// Calls f(config) with the filter configuration that (kernel, dtype) name; false when there is none.
template <class E, class F>
inline bool with_filter(int32_t kernel, F&& f) {
  switch (kernel) {
    case kRow128: f(Row128<E>{}); return true;
    case kRow128Deep: f(Row128Deep<E>{}); return true;
    case kRow256: f(Row256<E>{}); return true;
    case kRow512: f(Row512<E>{}); return true;
    case kRow512Deep: f(Row512Deep<E>{}); return true;
    case kCluster512: f(Cluster512<E>{}); return true;
    case kCluster512Deep: f(Cluster512Deep<E>{}); return true;
    default: return false;
  }
}

template <class F>
inline bool with_element(int32_t dtype, F&& f) {
  switch (dtype) {
    case kFloat32: f(Float32{}); return true;
    case kBFloat16: f(BFloat16{}); return true;
    case kFloat16: f(Float16{}); return true;
    default: return false;
  }
}

// p / d == (p * magic) >> shift for all 0 <= p < 2^31 (round-up method: magic = ceil(2^(31 + s) / d), s = ceil(log2
// d)).
inline void set_page_size(Args& a, int32_t d) {
  int32_t s = 0;
  while ((static_cast<int64_t>(1) << s) < d) ++s;
  a.page_size = d;
  a.page_shift = 31 + s;
  a.page_magic = static_cast<uint32_t>(((static_cast<uint64_t>(1) << (31 + s)) + d - 1) / d);
}

}  // namespace dsa
