// Ordered emission: a bitmap becomes ascending positions in the row's output.
#pragma once
#include "slice.cuh"

namespace dsa {

// Writes the positions of the bitmap's set bits, ascending, to the row's slots from `slot` on. A warp owns a contiguous
// part of the words, 32 of them a turn: each lane spreads its word's bits into the warp's stage (16 bits a position,
// relative to the turn's first), from where they are written coalesced. Warps do not wait for each other.
template <int kThreads, class E>
__device__ __forceinline__ void emit_bitmap(const Output<E>& output, const Slice& slice, const uint32_t* bitmap,
                                            uint16_t* stages, uint32_t* warp_counts, int32_t slot) {
  constexpr int kWarps = kThreads / 32, kTurn = 32 * 32;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t words = slice.last - slice.first;
  const int32_t per_warp = (words + kWarps - 1) / kWarps;
  const int32_t begin = warp * per_warp, end = words < begin + per_warp ? words : begin + per_warp;
  if (kWarps > 1) {
    uint32_t count = 0;
#pragma unroll 2
    for (int32_t i = begin + lane; i < end; i += 32) count += __popc(bitmap[i]);
    count = __reduce_add_sync(ptx::kFullMask, count);
    if (lane == 0) warp_counts[warp] = count;
    __syncthreads();
    slot += static_cast<int32_t>(warp_sum_first(warp_counts, warp, lane));
  }
  uint16_t* stage = stages + warp * kTurn;
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end; i0 += 32) {
    uint32_t word = i0 + lane < end ? bitmap[i0 + lane] : 0u;
    const uint32_t bits = __popc(word), inclusive = warp_inclusive_sum(bits, lane);
    const int32_t total = static_cast<int32_t>(__shfl_sync(ptx::kFullMask, inclusive, 31));
    uint16_t* at = stage + inclusive;
    while (word) {  // from the top, two bits a turn: the index of the highest bit is one instruction
      const uint32_t high = 31 - __clz(word), rest = word ^ (1u << high);
      at[-1] = static_cast<uint16_t>(lane * 32 + high);
      word = rest;
      if (rest) {
        const uint32_t next = 31 - __clz(rest);
        at[-2] = static_cast<uint16_t>(lane * 32 + next);
        word = rest ^ (1u << next);
      }
      at -= 2;
    }
    __syncwarp();
    const uint32_t base = static_cast<uint32_t>((slice.first + i0) * 32 - slice.shift);
    output.put_staged(slot, base, stage, total, lane);
    slot += total;
    __syncwarp();
  }
}

}  // namespace dsa
