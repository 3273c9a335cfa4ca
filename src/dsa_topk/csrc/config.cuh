// Shape of a filter kernel: compile-time configuration, shared memory, and the candidates it collects.
//
// Shared memory: FilterShared | arena: regions [cluster][region_cap] (kMulti), lists [kList + kSlack][kThreads], spill
// [kSpill]; reused for the plateau bitmap and, at the end, for the warps' staged positions | bitmap.
#pragma once
#include "slice.cuh"
#include "tester.cuh"

namespace dsa {

// launch.h names the instantiations and Python chooses among them.
template <class Element, int Threads, int SamplesPerThread, int ListEntries, int MinBlocks, bool Multi, int Bins = 512,
          int Slack = 8, int Spill = Threads >= 128 ? 512 : Threads * 4>
struct FilterConfig {
  using E = Element;
  static constexpr int kThreads = Threads, kWarps = Threads / 32, kSamples = SamplesPerThread;
  static constexpr int kList = ListEntries;  // candidates a thread keeps before it spills to the shared list
  static constexpr int kSlack = Slack;       // loads a thread tests before it looks at its list; the slack of the list
  static constexpr int kBatch = 8;           // loads of a thread under way together
  static constexpr int kSpill = Spill;       // and what the shared list holds
  static constexpr int kBins = Threads > 512 ? Threads : Bins;
  static constexpr int kMinBlocks = MinBlocks > 1 ? MinBlocks * (8 - ptx::kFewerBlocks) / 8 : 1;
  static constexpr bool kMulti = Multi;
  static constexpr bool kSpread = false;  // several blocks a row that are no cluster (split.cuh)
  static constexpr int kListBytes = ((kList + kSlack) * kThreads + kSpill) * 8;
  static constexpr int kStage =
      kListBytes / kWarps / 16 * 4;  // words of a warp's stage (emit.cuh), in the lists' place
  static constexpr int kArenaBytes = kListBytes;
  static_assert(kBatch % kSlack == 0, "a batch is tested in parts");
  static_assert(kSamples % 8 == 0, "samples come in groups of four quarter rows, two to a load");
  static_assert(kWarps <= 32, "per-warp counts are summed by one warp");
};

// Is the bracket as narrow as it should be? Too wide; or it reaches into the lowest samples, -inf or NaN.
enum Sight : int32_t { kClear, kBlurred, kLowest };

// Why a pass did not settle a row. A plateau pass has misses of its own.
enum Miss : int32_t { kTooLow, kTooHigh, kFullList, kHeavyTooLow, kHeavyTooHigh };

// A crossing bin with more entries than are ranked all against all.
struct Crowd {
  float top, scale;  // of the histogram
  int32_t bin, need;
  uint32_t lower;  // sure winners in the blocks before this one
};

constexpr int kTieCap = 128;  // entries of the crossing bin that are ranked all against all

// A score inside the bracket. In the lists, an entry of a 16-bit type has both scores of a load, of which at least one
// lies inside; its place is the first one's.
struct alignas(8) Entry {
  uint32_t value;  // bits of the score as float32
  uint32_t place;  // position + shift (slice.cuh)
};

template <int kBins>
struct alignas(16) FilterShared {
  static_assert(kTieCap * 8 <= kBins * 4, "ties share the histogram's place");
  union {
    uint32_t hist[kBins + 1];  // and one that nobody reads (sample.cuh)
    uint64_t ties[kTieCap];    // composite keys (choose.cuh), written when the histogram has said its last
  };
  uint32_t wa[32], wb[32], wc[32];  // one value a warp
  Found found[2];
  BlockCounts heads[kMaxCluster];
  uint32_t heavy;  // key of a heavy value beside which the bracket ends, or 0
  uint32_t tie_count, spill_count;
  uint64_t where, window;  // of the row; kept here and not in registers, which are short while a slice streams
  int32_t n, next_n;       // next: of the row that will take this one's place
  uint64_t next_window;
  float top, bottom;                   // ends of the sample
  int32_t rank_lo, rank_hi, rank_few;  // of the bracket in the sample (closer.cuh)
  // What a step notes for the next one (steps.cuh).
  Sight sight;
  int32_t inside;  // samples in the bracket
  float lo, hi;    // the bracket
  float bin_lo, bin_hi;
  Path path;    // of the row, should the next pass settle it
  Miss miss;    // why it did not settle the row
  float share;  // of a full list's candidates that are to be taken
  Crowd crowd;
  uint32_t lower;  // selected in the blocks before this one
};

// Where a sample waits that must be looked at closer: the place of the lists, out of the way of what peers send.
template <class C>
__device__ __forceinline__ float* sample_place(const Args& a) {
  static_assert(C::kThreads * C::kSamples * 4 <= C::kListBytes, "it fits there");
  uint8_t* arena = ptx::dynamic_smem() + sizeof(FilterShared<C::kBins>);
  return reinterpret_cast<float*>(arena + (C::kMulti ? a.cluster * a.region_cap * 8 : 0));
}

// The candidates of the row as this thread sees them: its own and the block's spill, or what all blocks of the row
// sent.
//
// Two scores share an entry of a 16-bit type. Where the bracket has few enough values, each has a bin of its own
// (`exact`): the differences of their bits.
template <class C>
struct Candidates {
  using E = typename C::E;
  static constexpr int32_t kNoBin = C::kBins - 1;  // exact bins: of scores above the bracket, and of some below it
  static_assert(E::kLoad == 1 || !C::kMulti, "blocks send entries as they were listed");

  FilterShared<C::kBins>& s;
  Entry* regions;  // [cluster][region_cap]
  Entry* own;      // this thread's column of [kList + kSlack][kThreads]
  Entry* spill;    // [kSpill]
  int32_t blocks, cap;
  float lo, hi;   // the bracket, for entries of two scores
  bool exact;     // each value of the bracket has a bin of its own; not around zero, which has two
  int32_t span;   // exact bins: the bracket's last one
  uint32_t flip;  // exact bins: what makes of two scores' bits numbers that grow as the scores fall
  uint32_t best;  // and that of the bracket's upper end

  __device__ __forceinline__ Candidates(const Args& a, FilterShared<C::kBins>& shared, uint8_t* arena) : s(shared) {
    regions = reinterpret_cast<Entry*>(arena);
    blocks = C::kMulti ? a.cluster : 1;
    cap = C::kMulti ? a.region_cap : 0;
    Entry* lists = regions + blocks * cap;
    own = lists + ptx::opaque_number(static_cast<int>(threadIdx.x));  // else rare rows' steps keep it
    spill = lists + (C::kList + C::kSlack) * C::kThreads;
    exact = false;
  }

  __device__ __forceinline__ void set_bracket(float low, float high) {
    lo = low;
    hi = high;
    if constexpr (E::kLoad == 2) {
      flip = low > 0.0f ? 0xffffffffu : 0u;
      best = (E::floor(high) ^ flip) & 0xffffu;
      span = static_cast<int32_t>((E::ceil(low) ^ flip) & 0xffffu) - static_cast<int32_t>(best);
      exact = (low > 0.0f || high < 0.0f) && span < kNoBin;
    }
  }

  // The bin of a score's bits, and the value of a bin.
  __device__ __forceinline__ int32_t exact_bin(uint32_t bits) const { return bin_of_number((bits ^ flip) & 0xffffu); }
  __device__ __forceinline__ uint32_t value_of(int32_t bin) const {
    return ((best + static_cast<uint32_t>(bin)) ^ flip) & 0xffffu;
  }
  __device__ __forceinline__ int32_t bin_of_number(uint32_t number) const {
    const uint32_t bin = number - best;
    return static_cast<int32_t>(bin < static_cast<uint32_t>(kNoBin) ? bin : static_cast<uint32_t>(kNoBin));
  }

  // Counts both scores of an entry by exact bin.
  __device__ __forceinline__ void count_pair(const Entry& e) const {
    const uint32_t numbers = e.value ^ flip, hist = ptx::smem_address(s.hist);
    ptx::count(hist + 4u * static_cast<uint32_t>(bin_of_number(numbers & 0xffffu)));
    ptx::count(hist + 4u * static_cast<uint32_t>(bin_of_number(numbers >> 16)));
  }

  // Visits every candidate of the row once over the block. `entries` = length of the thread's own list.
  template <class F>
  __device__ __forceinline__ void each(int entries, F&& f) const {
    if (C::kMulti) {
#pragma unroll 1
      for (int32_t r = 0; r < blocks; ++r) {
        const uint32_t n = s.heads[r].more;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < n; i += C::kThreads) visit(regions[r * cap + i], f);
      }
    } else {
      each_two_entries(entries, [&](const Entry& first, const Entry& second, bool two) {
        visit(first, f);
        if (two) visit(second, f);
      });
    }
  }
  template <class F>
  __device__ __forceinline__ void each_own(int entries, F&& f) const {
    each_own_entry<E::kLoad == 1>(entries, [&](const Entry& e) { visit(e, f); });
  }
  template <class F>
  __device__ __forceinline__ void each_spilled(F&& f) const {
    each_spilled_entry([&](const Entry& e) { visit(e, f); });
  }

  // The same for entries.
  template <bool kTwo = true, class F>
  __device__ __forceinline__ void each_own_entry(int entries, F&& f) const {
    between<kTwo>(own, own + entries * C::kThreads, f);
  }
  template <class F>
  __device__ __forceinline__ void each_spilled_entry(F&& f) const {
    between<false>(spill + threadIdx.x, spill + s.spill_count, f);
  }
  // Calls f(entry, another, whether there are two) for the thread's own entries and then its share of the spilled ones.
  template <class F>
  __device__ __forceinline__ void each_two_entries(int entries, F&& f) const {
    const Entry *e = own, *end = own + entries * C::kThreads;
#pragma unroll 1
    for (uint32_t spilled = s.spill_count;; spilled = 0) {
#pragma unroll 1
      for (; e < end; e += 2 * C::kThreads) {
        const bool two = e + C::kThreads < end;
        const Entry first = e[0], second = e[two ? C::kThreads : 0];
        f(first, second, two);
      }
      if (spilled == 0) break;
      e = spill + threadIdx.x;
      end = spill + spilled;
    }
  }
  template <bool kTwo, class F>  // two under way at a time
  static __device__ __forceinline__ void between(const Entry* e, const Entry* end, F&& f) {
#pragma unroll 1
    for (; kTwo && e + C::kThreads < end; e += 2 * C::kThreads) {
      const Entry first = e[0], second = e[C::kThreads];
      f(first);
      f(second);
    }
#pragma unroll 1
    for (; e < end; e += C::kThreads) f(*e);
  }

  // The candidates of one entry.
  template <class F>
  __device__ __forceinline__ void visit(const Entry& e, F&& f) const {
    if constexpr (E::kLoad == 1) {
      f(e);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const float x = E::value(static_cast<typename E::Bits>(e.value >> 16 * i));
        if (x >= lo && !(x > hi)) f(Entry{__float_as_uint(x), e.place + i});
      }
    }
  }
};

}  // namespace dsa
