// How the blocks of a row share it: contiguous slices of 32-score words, one bit a score in a block's shared-memory
// bitmap.
#pragma once
#include "block.cuh"
#include "row.cuh"

namespace dsa {

constexpr int kMaxCluster = 16;

// A row's places are counted from a 128-byte line of memory, so that a warp reads whole lines whatever the window's
// start: position p has place p + shift. A unit is what a warp loads at once, a 32-bit load a lane: E::kLoad words of
// the bitmap, of which words [first, last) are this block's, in whole units.
struct Slice {
  int32_t shift, first, last;
};

template <class E>
__device__ __forceinline__ int32_t row_shift(const Row<E>& row) {
  return static_cast<int32_t>((reinterpret_cast<uint64_t>(row.window) / sizeof(typename E::Bits)) &
                              (32u * E::kLoad - 1u));
}

template <class E>
__device__ __forceinline__ int64_t row_units(const Row<E>& row) {
  constexpr int kUnit = 32 * E::kLoad;
  return (static_cast<int64_t>(row_shift(row)) + row.n + kUnit - 1) / kUnit;
}

// Words of the longest slice.
template <class E>
__device__ __forceinline__ int64_t slice_words(const Row<E>& row, int32_t blocks) {
  return (row_units(row) + blocks - 1) / blocks * E::kLoad;
}

template <class E>
__device__ __forceinline__ Slice slice_of(const Row<E>& row, int32_t blocks, uint32_t rank) {
  Slice s;
  s.shift = row_shift(row);
  const int64_t units = row_units(row);
  s.first = static_cast<int32_t>(units * rank / blocks) * E::kLoad;
  s.last = static_cast<int32_t>(units * (rank + 1) / blocks) * E::kLoad;
  return s;
}

// What the blocks of a row tell each other.
struct BlockCounts {
  uint32_t selected;  // for sure (filter), or better than the plateau
  uint32_t more;      // entries sent, or copies of the plateau value
  uint32_t found;     // candidates among the entries
};

}  // namespace dsa
