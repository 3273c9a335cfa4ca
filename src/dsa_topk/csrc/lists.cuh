// The lists of split.cuh: what a block keeps of its slice, and how it is laid out for sending.
#pragma once
#include "kth.cuh"

namespace dsa {

// launch.h names the instantiations. `Quads`: groups of four scores that a thread samples.
template <class Element, int Threads, int PerThread, int Quads, int MinBlocks, bool Multi, bool Spread = false>
struct SplitConfig : FilterConfig<Element, Threads, 8, 8, MinBlocks, Multi> {
  static constexpr bool kSpread = Spread;  // blocks of a row that meet in a workspace (spread.cuh)
  static constexpr int kPer = PerThread, kVectors = kPer / 4, kChunk = kPer * 32, kQuads = Quads;
  static constexpr int kBatchScores = Threads * kPer;
  static constexpr int kEntries = Multi ? 4096 : 8192;  // of a block's list
  static constexpr int kPages = 2048;  // page-table entries of a block's slice, where they are no more than that
};

constexpr int32_t kMaxSplit = 1 << 30;  // positions of a batch beyond the row's end are still positive numbers

template <class C>
struct alignas(16) SplitShared {
  KthShared kth;
  unsigned long long arrived;  // mbarrier: the lists of all blocks of the row are here
  uint32_t lower;              // scores that the blocks before this one take
  int32_t pages[C::kPages];
  int32_t positions[C::kEntries];
  // What is sent: how many, and the scores. It is a block's region too; those of a cluster's blocks follow.
  alignas(16) uint32_t head[4];
  float scores[C::kEntries];
};

constexpr uint32_t kTooMany = 1u << 20;  // entries of a list that did not fit

// A list as it was sent, in the region of the block that sent it.
struct Region {
  const uint32_t* at;
  __device__ __forceinline__ uint32_t count() const { return at[0]; }
  __device__ __forceinline__ const float* scores() const { return reinterpret_cast<const float*>(at + 4); }
};

// The results of positions of a block's slice whose page-table entries lie in shared memory.
struct StagedPages {
  const int32_t* pages;
  uint32_t first;

  __device__ __forceinline__ uint32_t result(const Args& a, uint32_t p) const {
    const uint32_t page = page_of(a, p);
    return p + (static_cast<uint32_t>(pages[page - first]) - page) * static_cast<uint32_t>(a.page_size);
  }
};

}  // namespace dsa
