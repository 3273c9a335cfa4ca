// The lists of split.cuh: what a block keeps of its slice, and how it is laid out for sending.
#pragma once
#include "kth.cuh"

namespace dsa {

// launch.h names the instantiations. `Quads`: groups of four scores that a thread samples of long rows.
template <class Element, int Threads, int PerThread, int Quads, int MinBlocks, bool Multi, bool Spread = false>
struct SplitConfig : FilterConfig<Element, Threads, 8, 8, MinBlocks, Multi> {
  static constexpr bool kSpread = Spread;  // blocks of a row that meet in a workspace (spread.cuh)
  static constexpr int kPer = PerThread, kVectors = kPer / 4, kChunk = kPer * 32, kQuads = Quads;
  static constexpr int kBatchScores = Threads * kPer;
  static constexpr int kEntries = Multi ? 4096 : 10240;  // of a block's list; a block of 99 KB has room for it
  static constexpr int kPages = 2048;  // page-table entries of a block's slice, where they are no more than that
};

template <class C>
struct alignas(16) SplitShared {
  KthShared kth;
  unsigned long long arrived;  // mbarrier: the lists of all other blocks of the row are here
  uint32_t lower;              // scores that the blocks before this one take
  float head;                  // greatest sampled score
  float bottom, top;           // of the bins that look for the k-th score
  uint32_t first_page;         // of those that lie in `pages`, or kNoPages
  int32_t pages[C::kPages];
  // The block's list, in order of position.
  int32_t positions[C::kEntries];
  // What is sent: how many, and the scores. It is the block's own region; those of a cluster's blocks follow.
  alignas(16) uint32_t region[4];
  float scores[C::kEntries];
};

constexpr uint32_t kTooMany = 1u << 20;  // entries of a list that did not fit

// The lists of a cluster's blocks: how many scores, and they; the block's own one, and those that were sent to it.
template <class C>
struct Regions {
  uint32_t* own;
  uint32_t* others;
  uint32_t rank, pitch;

  __device__ __forceinline__ Regions(const Args& a, SplitShared<C>& shared, uint32_t rank_)
      : own(shared.region),
        others(reinterpret_cast<uint32_t*>(&shared + 1)),
        rank(rank_),
        pitch(static_cast<uint32_t>(a.region_cap) + 4u) {}
  // Where block `block` puts its list in the other blocks.
  __device__ __forceinline__ uint32_t* sent(uint32_t block) const { return others + block * pitch; }
  __device__ __forceinline__ const uint32_t* of(uint32_t block) const { return block == rank ? own : sent(block); }
  __device__ __forceinline__ uint32_t count(uint32_t block) const { return *of(block); }
  __device__ __forceinline__ const float* scores(uint32_t block) const {
    return reinterpret_cast<const float*>(of(block) + 4);
  }
};

constexpr uint32_t kNoPages = 0xffffffffu;

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
