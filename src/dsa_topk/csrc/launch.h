// Which instantiation runs: the list of kernels and the shared memory each launch needs. Host code shared by the
// binding (module.cu) and the CPU emulator; the choice among the kernels is made in Python (_plan.py), which names one
// by its number.
#pragma once
#include <stddef.h>

#include <type_traits>

#include "filter.cuh"
#include "order.cuh"
#include "resident.cuh"
#include "split.cuh"

namespace dsa {

// Rows of one block. Lists are as long as the blocks of an SM leave room for beside bitmaps of 32768 (128 threads) or
// 131072 scores: a full list costs its warp the time of two loads each time one of its threads meets a candidate.
// 16-bit scores have fewer entries to the slack.
template <class E, int Threads, int Samples, int MinBlocks>
struct RowConfigOf {
  static constexpr bool k16 = E::kLoad == 2;
  static constexpr int kSlack = k16 ? 4 : 8,
                       kList = (Threads == 128   ? 19
                                : Threads == 256 ? 17
                                                 : 21) -
                               kSlack,
                       kSpill = Threads == 128   ? 160
                                : Threads == 256 ? 384
                                                 : 512;
  using Type = FilterConfig<E, Threads, Samples, kList, MinBlocks, false, 512, kSlack, kSpill>;
};
// Threads, samples a thread, blocks an SM.
template <class E, int Threads, int Samples, int MinBlocks>
using RowConfig = typename RowConfigOf<E, Threads, Samples, MinBlocks>::Type;
template <class E>
using Row128 = RowConfig<E, 128, 8, 8>;
template <class E>
using Row128Deep = RowConfig<E, 128, 16, 8>;
template <class E>
using Row256Light = RowConfig<E, 256, 8, 4>;
template <class E>
using Row256 = RowConfig<E, 256, 16, 4>;
template <class E>
using Row512 = RowConfig<E, 512, 8, 2>;
// Threads, samples a thread, list entries a thread, blocks an SM, several blocks a row.
template <class E>
using Cluster512 = FilterConfig<E, 512, 8, 8, 1, true>;
// Threads, scores a thread, blocks an SM: rows of at most threads x scores (and the misalignment of their start).
template <class E>
using Held4K = ResidentConfig<E, 512, 8, 2>;
template <class E>
using Held8K = ResidentConfig<E, 512, 16, 2>;
template <class E>
using Held16K = ResidentConfig<E, 512, 32, 1>;
template <class E>
using Held16KTwin = ResidentConfig<E, 512, 32, 2>;  // two on an SM
template <class E>
using Held32K = ResidentConfig<E, 1024, 32, 1>;

// Threads, scores a thread and batch, groups of four a thread samples of long rows, blocks an SM, several blocks a row:
// rows of any length.
template <class E>
using Split512 = SplitConfig<E, 512, 16, 2, 1, true>;
template <class E>
using Whole512 = SplitConfig<E, 512, 16, 1, 2, false>;
template <class E>
using Whole1024 = SplitConfig<E, 1024, 16, 1, 1, false>;

// A few rows over all SMs, for devices without clusters (docs/kernel-notes.md).
template <class E>
using Spread512 = SplitConfig<E, 512, 16, 4, 1, false, true>;

// _plan.py has the same table: it chooses by samples and list capacity.
enum Kernel : int32_t {
  kRow128 = 0,
  kRow128Deep = 1,
  kRow256Light = 2,
  kRow256 = 3,
  kRow512 = 4,
  kCluster512 = 5,
  kHeld4K = 6,
  kHeld8K = 7,
  kHeld16K = 8,
  kHeld16KTwin = 9,
  kHeld32K = 10,
  kSplit512 = 11,
  kWhole512 = 12,
  kWhole1024 = 13,
  kSpread512 = 14,
  kKernels = 15
};

struct LaunchShape {
  int32_t threads = 0, cluster = 0, smem_bytes = 0;
  int64_t blocks = 0;  // 0: there is no such launch
  int64_t workspace_bytes = 0;
};

struct Limits {  // of the device; what is here is an H200's
  int32_t smem_per_block = 227 * 1024, smem_per_sm = 228 * 1024, sms = 132;
};

// Fills the launch-dependent fields of `a` for a filter kernel and says how to launch it.
template <class C>
inline LaunchShape filter_shape(Args& a, int32_t cluster, const Limits& limits) {
  constexpr int64_t kUnit = 32 * C::E::kLoad;
  const int64_t units = (static_cast<int64_t>(a.width) + 2 * kUnit - 2) / kUnit;  // whatever the window's start
  const int32_t smem_limit = limits.smem_per_block;
  a.cluster = C::kMulti ? cluster : 1;
  a.ahead = limits.sms * C::kMinBlocks;
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

template <class C>
inline LaunchShape resident_shape(Args& a, const Limits& limits) {
  a.cluster = 1;
  a.region_cap = 0;
  a.arena_bytes = C::kArenaBytes;
  a.bitmap_words = 0;
  const size_t own = offsetof(ResidentShared<C>, kth) + offsetof(KthShared, hist) +
                     4 * static_cast<size_t>(a.k > Bins::kFine ? a.k : Bins::kFine),
               exact = sizeof(FilterShared<C::kBins>) + sizeof(ExactShared);
  int32_t bytes = static_cast<int32_t>(own > exact ? own : exact);
  // Rows that fit the SMs one by one get one each: two on an SM take a third longer (docs/kernel-notes.md).
  const int32_t alone = limits.smem_per_sm / 2 + 1024;
  if (a.rows <= limits.sms && bytes < alone && alone <= limits.smem_per_block) bytes = alone;
  return LaunchShape{C::kThreads, 1, bytes, a.rows};
}

constexpr int32_t kSpreadCap = 4096;  // entries that a block of a spread row can leave

template <class C>
inline LaunchShape split_shape(Args& a, int32_t cluster, const Limits& limits) {
  // A cluster of one block would wait for what nobody sends; one block a row is the others' work.
  if (C::kMulti && cluster < 2) return LaunchShape{};
  // The filter path that it falls back to comes first: fills the same fields.
  const LaunchShape other = filter_shape<C>(a, cluster, limits);
  // What one block can send: its whole list, or as much as large clusters have room for. Most of what a row lists may
  // lie in one block's slice.
  a.region_cap = C::kMulti ? (cluster > 8 ? 2688 : 4096) : 0;
  if (C::kSpread) a.cluster = cluster;
  a.cluster_magic = 0xffffffffu / static_cast<uint32_t>(a.cluster) + 1u;  // not used where that is 2^32
  const int32_t own =
      static_cast<int32_t>(sizeof(SplitShared<C>)) + (C::kMulti ? a.cluster * (a.region_cap + 4) * 4 : 0);
  LaunchShape shape = other;
  shape.smem_bytes = own;
  if (C::kSpread) {
    a.region_cap = kSpreadCap;
    shape.blocks = static_cast<int64_t>(a.rows) * cluster;
    shape.workspace_bytes = 4 * (kTickets + shape.blocks * (4 + 2 * kSpreadCap));
  }
  return shape;
}

// A kernel and how to launch it: what the binding and the emulator see of a configuration.
template <class C>
struct FilterLaunch {
  static constexpr bool kMulti = C::kMulti;
  static LaunchShape shape(Args& a, int32_t cluster, const Limits& limits) {
    return filter_shape<C>(a, cluster, limits);
  }
  static constexpr void (*kernel)(Args) = filter_kernel<C>;
};
template <class C>
struct ResidentLaunch {
  static constexpr bool kMulti = false;
  static LaunchShape shape(Args& a, int32_t, const Limits& limits) { return resident_shape<C>(a, limits); }
  static constexpr void (*kernel)(Args) = resident_kernel<C>;
};

template <class C>
struct SplitLaunch {
  static constexpr bool kMulti = C::kMulti;
  static LaunchShape shape(Args& a, int32_t cluster, const Limits& limits) {
    return split_shape<C>(a, cluster, limits);
  }
  static constexpr void (*kernel)(Args) = split_kernel<C>;
};

// 16-bit scores take the next larger kernel of a family here and there: less to compile, for types with no tuned
// decode.
template <class E, class For32, class For16>
using BySize = typename std::conditional<sizeof(typename E::Bits) == 4, For32, For16>::type;

// Calls f(launch) with the launch that (kernel, dtype) name; false when there is none. Two families: rows that fill the
// device, and a few rows.
template <class E, class F>
inline bool with_rows_kernel(int32_t kernel, F&& f) {
  switch (kernel) {
    case kRow128: f(FilterLaunch<Row128<E>>{}); return true;
    case kRow128Deep: f(FilterLaunch<Row128Deep<E>>{}); return true;
    case kRow256Light: f(FilterLaunch<BySize<E, Row256Light<E>, Row256<E>>>{}); return true;
    case kRow256: f(FilterLaunch<Row256<E>>{}); return true;
    case kRow512: f(FilterLaunch<BySize<E, Row512<E>, Row256<E>>>{}); return true;
    default: return false;
  }
}
template <class E, class F>
inline bool with_few_kernel(int32_t kernel, F&& f) {
  switch (kernel) {
    case kCluster512: f(BySize<E, FilterLaunch<Cluster512<E>>, SplitLaunch<Split512<E>>>{}); return true;
    case kHeld4K: f(ResidentLaunch<BySize<E, Held4K<E>, Held8K<E>>>{}); return true;
    case kHeld8K: f(ResidentLaunch<Held8K<E>>{}); return true;
    case kHeld16K: f(ResidentLaunch<Held16K<E>>{}); return true;
    case kHeld16KTwin: f(ResidentLaunch<BySize<E, Held16KTwin<E>, Held16K<E>>>{}); return true;
    case kHeld32K: f(BySize<E, ResidentLaunch<Held32K<E>>, SplitLaunch<Whole1024<E>>>{}); return true;
    case kSplit512: f(SplitLaunch<Split512<E>>{}); return true;
    case kWhole512: f(SplitLaunch<BySize<E, Whole512<E>, Whole1024<E>>>{}); return true;
    case kWhole1024: f(SplitLaunch<Whole1024<E>>{}); return true;
    case kSpread512: f(SplitLaunch<BySize<E, Spread512<E>, Whole1024<E>>>{}); return true;
    default: return false;
  }
}
template <class E, class F>
inline bool with_kernel(int32_t kernel, F&& f) {
  return with_rows_kernel<E>(kernel, f) || with_few_kernel<E>(kernel, f);
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

// Fills simple_room and simple_pages; follows set_page_size.
inline void set_simple(Args& a) {
  a.simple_room = -1;
  a.simple_pages = 0;
  if (!a.lengths.data || a.lengths.is64 || a.row_starts.data || a.page_table_starts.data) return;
  if (a.form != kPaged) {
    a.simple_room = a.width;
  } else if (a.row_to_batch.data || a.table_rows >= a.rows) {
    const bool short_table = a.table_width < a.width && a.table_width * a.page_size < a.width;
    a.simple_room = short_table ? static_cast<int32_t>(a.table_width * a.page_size) : a.width;
    a.simple_pages = static_cast<int32_t>((static_cast<int64_t>(a.simple_room) + a.page_size - 1) / a.page_size);
  }
}

// p / d == (2p * magic) >> (32 + shift) for all 0 <= p < 2^31 (round-up method: shift = ceil(log2 d), magic =
// ceil(2^(31 + shift) / d)). Where p * d < 2^32, ceil(2^32 / d) needs no shift.
inline void set_page_size(Args& a, int32_t d) {
  int32_t s = 0;
  while ((static_cast<int64_t>(1) << s) < d) ++s;
  a.page_size = d;
  a.page_shift = s;
  a.page_magic = static_cast<uint32_t>(((static_cast<uint64_t>(1) << (31 + s)) + d - 1) / d);
  a.page_near = d > 1 ? static_cast<uint32_t>(((static_cast<uint64_t>(1) << 32) + d - 1) / d) : 0u;
}

}  // namespace dsa
