// order="score": sorts the selected positions of a row by rank and writes them where the call wants them.
//
// Second launch of two: the first one (Args::raw) left the positions of each row in `out`. One block a row; bitonic
// sort of (score key, tie order) in shared memory, 8 bytes a selected position (64 KB at k = 8192). Not a fast path.
#pragma once
#include "row.cuh"

namespace dsa {

constexpr int kOrderThreads = 1024;

template <class Element>
struct OrderConfig {
  using E = Element;
};

template <class C>
__global__ void __launch_bounds__(kOrderThreads, 1) order_kernel(const __grid_constant__ Args a) {
  using E = typename C::E;
  uint64_t* keys = reinterpret_cast<uint64_t*>(ptx::dynamic_smem());
  const int tid = threadIdx.x;
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  const Row<E> row(a, blockIdx.x);
  const Output<E> output(a, row, blockIdx.x);
  const int32_t count = row.n < a.k ? row.n : a.k;
  int32_t size = 1;
  while (size < count) size <<= 1;
#pragma unroll 1
  for (int32_t i = tid; i < size; i += kOrderThreads) {
    uint64_t key = ~static_cast<uint64_t>(0);  // filler sorts last
    if (i < count) {
      const uint32_t p = static_cast<uint32_t>(output.out[i]);
      key = static_cast<uint64_t>(~key_of(E::value(row.window[p]))) << 32 | (a.largest ? ~p : p);
    }
    keys[i] = key;
  }
  for (int32_t span = 2; span <= size; span <<= 1) {
    for (int32_t step = span >> 1; step > 0; step >>= 1) {
      __syncthreads();
#pragma unroll 1
      for (int32_t i = tid; i < size / 2; i += kOrderThreads) {
        const int32_t lower = 2 * i - (i & (step - 1)), upper = lower + step;
        const uint64_t x = keys[lower], y = keys[upper];
        if ((x > y) == ((lower & span) == 0)) {
          keys[lower] = y;
          keys[upper] = x;
        }
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t slot = tid; slot < a.k; slot += kOrderThreads) {
    if (slot < count) {
      const uint32_t low = static_cast<uint32_t>(keys[slot]);
      output.put(slot, a.largest ? ~low : low);
    } else {
      output.pad(slot);
    }
  }
}

}  // namespace dsa
