// Ordered emission: a bitmap becomes ascending positions in the row's output.
#pragma once
#include "slice.cuh"

namespace dsa {

// The 16 low bits of x to the even bits.
__device__ __forceinline__ uint32_t spread_bits(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  x = (x | x << 2) & 0x33333333u;
  return (x | x << 1) & 0x55555555u;
}

// Neighbouring lanes hold the words of a unit's even and odd places: turns them into its first and second word.
__device__ __forceinline__ uint32_t unpair(uint32_t word, int lane) {
  const uint32_t other = __shfl_xor_sync(ptx::kFullMask, word, 1), half = lane & 1 ? 16u : 0u;
  const uint32_t even = (lane & 1 ? other : word) >> half, odd = (lane & 1 ? word : other) >> half;
  return spread_bits(even & 0xffffu) | spread_bits(odd & 0xffffu) << 1;
}

// Writes the positions of the bitmap's set bits, ascending, to the row's slots from `slot` on. A warp owns a contiguous
// part of the words, 32 of them a turn: each lane spreads its word's bits into the warp's stage (16 bits a position,
// relative to the turn's first), from where they are written coalesced. Warps do not wait for each other.
//
// `paired`: the bits lie as bit_of() says, else one after the other.
template <int kThreads, class E>
__device__ __forceinline__ void emit_bitmap(const Output<E>& output, const Slice& slice, const uint32_t* bitmap,
                                            Stage* stages, uint32_t* warp_counts, int32_t slot, bool paired) {
  constexpr int kWarps = kThreads / 32;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t words = slice.last - slice.first;
  const int32_t per_warp = (words + kWarps * E::kLoad - 1) / (kWarps * E::kLoad) * E::kLoad;  // whole units
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
  Stage& stage = stages[warp];
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end; i0 += 32) {
    const int32_t base = (slice.first + i0) * 32 - slice.shift;
    const NearPage near = output.near_page(base, lane);  // on its way while the words are looked at
    uint32_t word = i0 + lane < end ? bitmap[i0 + lane] : 0u;
    if (E::kLoad == 2 && paired) word = unpair(word, lane);
    const uint32_t bits = __popc(word), inclusive = warp_inclusive_sum(bits, lane);
    const int32_t total = static_cast<int32_t>(__shfl_sync(ptx::kFullMask, inclusive, 31));
    uint16_t* at = stage.positions + inclusive;
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
    stage.add[lane] = output.add_of(near, base);
    __syncwarp();
    output.put_staged(slot, base, stage, total, lane);
    slot += total;
    __syncwarp();
  }
}

}  // namespace dsa
