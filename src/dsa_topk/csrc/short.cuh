// How a row of the decode kernels ends that is not decided there: too short for a choice, or left to the exact path.
// Calls that never return, so that the kernels keep no registers for them.
#pragma once
#include "retry.cuh"

namespace dsa {

// Finishes a row by the path that is right for every row (exact.cuh).
template <class C>
__device__ __noinline__ void exact_path(const Args& a) {
  exact_step<C>(a);
}

// Finishes a row that has no more scores than are wanted.
template <class C>
__device__ __noinline__ void short_row(const Args& a, uint32_t rank, int32_t blocks) {
  const int32_t index = row_index<C>(a);
  const Row<typename C::E> row(a, index);
  count_path<C>(a, rank, kTrivial);
  Output<typename C::E>(a, row, index)
      .put_all(static_cast<int32_t>(rank * C::kThreads + threadIdx.x), blocks * C::kThreads);
}

}  // namespace dsa
