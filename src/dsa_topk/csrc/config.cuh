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
          int Slack = 8>
struct FilterConfig {
  using E = Element;
  static constexpr int kThreads = Threads, kWarps = Threads / 32, kSamples = SamplesPerThread;
  static constexpr int kList = ListEntries;  // candidates a thread keeps before it spills to the shared list
  static constexpr int kSlack = Slack;       // loads a thread tests before it looks at its list; the slack of the list
  static constexpr int kBatch = 8;           // loads of a thread under way together
  // As much as four blocks of 256 threads with bitmaps of 131072 scores leave of an SM.
  static constexpr int kSpill = Threads == 256 ? 640 : Threads >= 128 ? 512 : Threads * 4;
  static constexpr int kBins = Threads > 512 ? Threads : Bins;
  static constexpr int kMinBlocks = MinBlocks > 1 ? MinBlocks * (8 - ptx::kFewerBlocks) / 8 : 1;
  static constexpr bool kMulti = Multi;
  static constexpr bool kSpread = false;  // several blocks a row that are no cluster (split.cuh)
  static constexpr int kListBytes = ((kList + kSlack) * kThreads + kSpill) * 8;
  static constexpr int kStageBytes = kWarps * static_cast<int>(sizeof(Stage<32 * 32 * E::kLoad>));  // emit.cuh
  static constexpr int kArenaBytes = kListBytes > kStageBytes ? kListBytes : kStageBytes;
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
    uint32_t hist[kBins];
    uint64_t ties[kTieCap];  // composite keys (choose.cuh), written when the histogram has said its last
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
  bool paired;     // whether the bitmap is as bit_of() says (emit.cuh)
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
// Two scores share an entry of a 16-bit type. Where the bracket has few enough values for a bin each (`exact`), their
// bins take the scores' place as they are counted (bin_pair), and whoever comes after needs no arithmetic.
template <class C>
struct Candidates {
  using E = typename C::E;
  static constexpr uint32_t kNoBin = C::kBins - 1;  // of a score outside the bracket
  static_assert(E::kLoad == 1 || !C::kMulti, "blocks send entries as they were listed");

  FilterShared<C::kBins>& s;
  Entry* regions;  // [cluster][region_cap]
  Entry* own;      // this thread's column of [kList + kSlack][kThreads]
  Entry* spill;    // [kSpill]
  int32_t blocks, cap;
  float lo, hi;             // the bracket, for entries of two scores
  uint32_t high_key, span;  // the same as keys of 16 bits: its upper end, and how far down it reaches
  bool exact;               // each value of the bracket has a bin of its own; not around zero, which has two keys

  __device__ __forceinline__ Candidates(const Args& a, FilterShared<C::kBins>& shared, uint8_t* arena) : s(shared) {
    regions = reinterpret_cast<Entry*>(arena);
    blocks = C::kMulti ? a.cluster : 1;
    cap = C::kMulti ? a.region_cap : 0;
    Entry* lists = regions + blocks * cap;
    own = lists + threadIdx.x;
    spill = lists + (C::kList + C::kSlack) * C::kThreads;
    exact = false;
  }

  __device__ __forceinline__ void set_bracket(float low, float high) {
    lo = low;
    hi = high;
    if constexpr (E::kLoad == 2) {
      high_key = pair_keys(E::floor(high)) & 0xffffu;
      span = high_key - (pair_keys(E::ceil(low)) & 0xffffu);
      exact = span < kNoBin && (low > 0.0f || high < 0.0f);
    }
  }

  // Counts both scores of an entry by bin and puts their bins in their place; returns how many are candidates.
  __device__ __forceinline__ uint32_t bin_pair(Entry e, Entry* place) const {
    const uint32_t keys = pair_keys(e.value), hist = ptx::smem_address(s.hist);
    uint32_t first = high_key - (keys & 0xffffu), second = high_key - (keys >> 16);
    const uint32_t found = (first <= span ? 1u : 0u) + (second <= span ? 1u : 0u);
    first = first <= span ? first : kNoBin;
    second = second <= span ? second : kNoBin;
    ptx::count(hist + 4u * first);
    ptx::count(hist + 4u * second);
    place->value = first | second << 16;
    return found;
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
      each_own(entries, f);
      each_spilled(f);
    }
  }
  template <class F>
  __device__ __forceinline__ void each_own(int entries, F&& f) const {
    between<E::kLoad == 1>(own, own + entries * C::kThreads, [&](const Entry& e, Entry*) { visit(e, f); });
  }
  template <class F>
  __device__ __forceinline__ void each_spilled(F&& f) const {
    between<false>(spill + threadIdx.x, spill + s.spill_count, [&](const Entry& e, Entry*) { visit(e, f); });
  }

  // Calls f(entry, where it lies) for the thread's own entries, its share of the spilled ones, or both (code once).
  template <class F>
  __device__ __forceinline__ void each_own_entry(int entries, F&& f) const {
    between<true>(own, own + entries * C::kThreads, f);
  }
  template <class F>
  __device__ __forceinline__ void each_spilled_entry(F&& f) const {
    between<false>(spill + threadIdx.x, spill + s.spill_count, f);
  }
  template <class F>
  __device__ __forceinline__ void each_entry(int entries, F&& f) const {
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      between<true>(part == 0 ? own : spill + threadIdx.x,
                    part == 0 ? own + entries * C::kThreads : spill + s.spill_count, f);
    }
  }
  template <bool kTwo, class F>  // two under way at a time
  static __device__ __forceinline__ void between(Entry* e, const Entry* end, F&& f) {
#pragma unroll 1
    for (; kTwo && e + C::kThreads < end; e += 2 * C::kThreads) {
      const Entry first = e[0], second = e[C::kThreads];
      f(first, e);
      f(second, e + C::kThreads);
    }
#pragma unroll 1
    for (; e < end; e += C::kThreads) f(*e, e);
  }

  // The candidates of one entry.
  template <class F>
  __device__ __forceinline__ void visit(const Entry& e, F&& f) const {
    if constexpr (E::kLoad == 1) {
      f(e);
    } else if (exact) {  // follows bin_pair
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t bin = e.value >> 16 * i & 0xffffu;
        if (bin != kNoBin) {
          const auto bits = static_cast<typename E::Bits>(bits_of_keys(high_key - bin));
          f(Entry{__float_as_uint(E::value(bits)), e.place + i});
        }
      }
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
