// How the blocks of a row share it: contiguous slices of 32-score words, one bit a score in a block's shared-memory
// bitmap.
#pragma once
#include "block.cuh"
#include "row.cuh"

namespace dsa {

constexpr int kMaxCluster = 16;

// Bit b of the row's bitmap is position b - shift; words [first, last) are this block's. Words are aligned to 128 bytes
// of memory (64 for 16-bit scores), so that a warp reads whole cache lines whatever the window's start.
struct Slice {
  int32_t shift, first, last;
};

template <class E>
__device__ __forceinline__ int32_t row_shift(const Row<E>& row) {
  return static_cast<int32_t>((reinterpret_cast<uint64_t>(row.window) / sizeof(typename E::Bits)) & 31u);
}

template <class E>
__device__ __forceinline__ int64_t row_words(const Row<E>& row) {
  return (static_cast<int64_t>(row_shift(row)) + row.n + 31) >> 5;
}

template <class E>
__device__ __forceinline__ Slice slice_of(const Row<E>& row, int32_t blocks, uint32_t rank) {
  Slice s;
  s.shift = row_shift(row);
  const int64_t words = row_words(row);
  s.first = static_cast<int32_t>(words * rank / blocks);
  s.last = static_cast<int32_t>(words * (rank + 1) / blocks);
  return s;
}

// What the blocks of a row tell each other.
struct BlockCounts {
  uint32_t selected;  // for sure (filter), or better than the plateau
  uint32_t more;      // candidates sent, or copies of the plateau value
};

}  // namespace dsa
