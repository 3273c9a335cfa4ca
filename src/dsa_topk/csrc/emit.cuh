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

// The words of a unit's even and odd places become its first and second word.
__device__ __forceinline__ uint2 unpair(uint2 words) {
  return uint2{spread_bits(words.x & 0xffffu) | spread_bits(words.y & 0xffffu) << 1,
               spread_bits(words.x >> 16) | spread_bits(words.y >> 16) << 1};
}

// Positions that surely fit a warp's stage: those of the fewest words a turn can have, one unit a lane.
template <class E>
using StageOf = Stage<32 * 32 * E::kLoad>;

// Writes the positions of the bitmap's set bits, ascending, to the row's slots from `slot` on. A warp owns a contiguous
// part of the words and takes some of them a turn, the more the fewer bits they have: each lane spreads the bits of its
// one to four neighbouring words into the warp's stage (16 bits a position, relative to the turn's first), from where
// they are written coalesced. Warps do not wait for each other.
//
// `paired`: the bits lie as bit_of() says, else one after the other.
template <int kThreads, class E>
__device__ __forceinline__ void emit_bitmap(const Output<E>& output, const Slice& slice, const uint32_t* bitmap,
                                            StageOf<E>* stages, uint32_t* warp_counts, int32_t slot, bool paired) {
  constexpr int kWarps = kThreads / 32, kLoad = E::kLoad, kRoom = StageOf<E>::kRoom;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t words = slice.last - slice.first;
  const int32_t per_warp = (words + kWarps * kLoad - 1) / (kWarps * kLoad) * kLoad;  // whole units
  const int32_t begin = warp * per_warp, end = words < begin + per_warp ? words : begin + per_warp;
  uint32_t count = 0;
#pragma unroll 2
  for (int32_t i = begin + lane; i < end; i += 32) count += __popc(bitmap[i]);
  count = __reduce_add_sync(ptx::kFullMask, count);
  if (kWarps > 1) {
    if (lane == 0) warp_counts[warp] = count;
    __syncthreads();
    slot += static_cast<int32_t>(warp_sum_first(warp_counts, warp, lane));
  }
  StageOf<E>& stage = stages[warp];
  // Words a lane, so that a turn has two thirds of what there is room for, on average.
  int32_t each = kTurnWords;
  while (each > kLoad && static_cast<int32_t>(count) * each * 48 > (end - begin) * kRoom) each >>= 1;
#pragma unroll 1
  for (int32_t i0 = begin; i0 < end;) {
    const int32_t base = (slice.first + i0) * 32 - slice.shift;
    output.ask_pages(stage, base, each * 1024, lane);  // on their way while the words are looked at
    const int32_t own = i0 + lane * each;
    uint32_t bits = 0;
#pragma unroll 1
    for (int32_t i = own; i < own + each && i < end; ++i) bits += __popc(bitmap[i]);
    const uint32_t inclusive = warp_inclusive_sum(bits, lane);
    const int32_t total = static_cast<int32_t>(__shfl_sync(ptx::kFullMask, inclusive, 31));
    if (total > kRoom) {  // unevenly spread
      each = kLoad;
      continue;
    }
    uint16_t* at = stage.positions + inclusive;
    const auto spread = [&](uint32_t word, int32_t i) {
      const uint32_t first = static_cast<uint32_t>(i - i0) * 32u;
      while (word) {  // from the top, two bits a turn: the index of the highest bit is one instruction
        const uint32_t high = 31 - __clz(word), rest = word ^ (1u << high);
        at[-1] = static_cast<uint16_t>(first + high);
        word = rest;
        if (rest) {
          const uint32_t next = 31 - __clz(rest);
          at[-2] = static_cast<uint16_t>(first + next);
          word = rest ^ (1u << next);
          --at;
        }
        --at;
      }
    };
#pragma unroll 1
    for (int32_t i = own + each - kLoad; i >= own; i -= kLoad) {
      if constexpr (kLoad == 1) {
        if (i < end) spread(bitmap[i], i);
      } else if (i < end) {
        uint2 unit = *reinterpret_cast<const uint2*>(bitmap + i);
        if (paired) unit = unpair(unit);
        spread(unit.y, i + 1);
        spread(unit.x, i);
      }
    }
    output.set_pages(stage, base, each * 1024, lane);
    __syncwarp();
    output.put_staged(slot, base, stage, total, lane);
    slot += total;
    i0 += each * 32;
    __syncwarp();
  }
}

}  // namespace dsa
