// Ordered emission: a bitmap becomes ascending positions in the row's output.
#pragma once
#include "slice.cuh"

namespace dsa {

// Writes the bitmap's positions in ascending order to the row's slots from `slot` on. `stage` holds them in between so that
// the stores are coalesced.
template <int kThreads, class E>
__device__ __forceinline__ void emit_bitmap(const Output<E>& output, const Slice& slice, const uint32_t* bitmap, uint32_t* stage, uint32_t* warp_counts, int32_t slot) {
  constexpr int kWarps = kThreads / 32;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t words = slice.last - slice.first;
  const int32_t per_warp = (words + kWarps - 1) / kWarps;
  const int32_t begin = warp * per_warp, end = words < begin + per_warp ? words : begin + per_warp;
  uint32_t count = 0;
  for (int32_t i = begin + lane; i < end; i += 32) count += __popc(bitmap[i]);
  count = __reduce_add_sync(ptx::kFullMask, count);
  if (lane == 0) warp_counts[warp] = count;
  __syncthreads();
  uint32_t before = warp_sum_first(warp_counts, warp, lane);
  const int32_t total = static_cast<int32_t>(warp_sum_first(warp_counts, kWarps, lane));
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end; i0 += 32) {
    const int32_t i = i0 + lane;
    uint32_t word = i < end ? bitmap[i] : 0u;
    const uint32_t bits = __popc(word), inclusive = warp_inclusive_sum(bits, lane);
    uint32_t* at = stage + before + inclusive - bits;
    before += __shfl_sync(ptx::kFullMask, inclusive, 31);
    const uint32_t base = static_cast<uint32_t>((slice.first + i) * 32 - slice.shift);
    while (word) {  // two bits a turn
      const uint32_t rest = word & (word - 1);
      at[0] = base + __ffs(word) - 1;
      if (rest) at[1] = base + __ffs(rest) - 1;
      at += 2;
      word = rest & (rest - 1);
    }
    __syncwarp();
  }
  __syncthreads();
  int32_t* out = output.out + slot;
  if (output.positions == nullptr && output.scores == nullptr && (reinterpret_cast<uint64_t>(out) & 15u) == 0) {
    const int32_t quads = total >> 2;
#pragma unroll 1
    for (int32_t i = tid; i < quads; i += kThreads) {
      const uint4 p = reinterpret_cast<const uint4*>(stage)[i];
      reinterpret_cast<int4*>(out)[i] = make_int4(output.stored(p.x), output.stored(p.y), output.stored(p.z), output.stored(p.w));
    }
#pragma unroll 1
    for (int32_t i = quads * 4 + tid; i < total; i += kThreads) out[i] = output.stored(stage[i]);
  } else {
#pragma unroll 1
    for (int32_t i = tid; i < total; i += kThreads) output.put(slot + i, stage[i]);
  }
}

}  // namespace dsa
