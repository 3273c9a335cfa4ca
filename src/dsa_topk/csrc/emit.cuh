// Ordered emission: a bitmap becomes ascending positions in the row's output.
#pragma once
#include "slice.cuh"

namespace dsa {

constexpr uint32_t kManyBits = 96;  // of a lane in a turn

// Writes the positions of the bitmap's set bits, ascending, to the row's slots from `slot` on. A warp owns a contiguous
// part of the words and a lane neighbouring ones of these, as many as it takes for one turn: the more bits a lane has,
// the less lanes differ. Each lane spreads its bits into the warp's stage, from where results leave in order, 16 bytes
// a lane (row.cuh). Warps do not wait for each other but for the counts of those before them.
//
// `stages`: kRoom words a warp, on 16-byte boundaries.
template <int kThreads, int kRoom, class E>
__device__ __forceinline__ void emit_bitmap(const Output<E>& output, const Slice& slice, const uint32_t* bitmap,
                                            uint32_t* stages, uint32_t* warp_counts, int32_t slot) {
  constexpr int kWarps = kThreads / 32;
  // Words of a lane whose positions surely fit, wherever the slot lies; an odd number.
  constexpr int32_t kMost = ((kRoom - 3) / 32 - 1) | 1;
  static_assert(kMost >= 31 && kRoom % 4 == 0, "a stage holds what a lane has");
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int32_t words = slice.last - slice.first, per_warp = (words + kWarps - 1) / kWarps;
  const int32_t begin = warp * per_warp, end = words < begin + per_warp ? words : begin + per_warp;
  int32_t each = (per_warp + 31) >> 5;
  if ((each & 3) == 0) ++each;  // lanes that read words a multiple of four apart would wait for each other
  if (each > kMost) each = kMost;
  // Set bits of the lane's words of the turn that begins at word `from`.
  const auto count = [&](int32_t from) {
    const int32_t own = from + lane * each, last = own + each < end ? own + each : end;
    uint32_t sum = 0;
#pragma unroll 1
    for (int32_t i = own; i < last; ++i) sum += __popc(bitmap[i]);
    return sum;
  };
  uint32_t bits = count(begin), all = bits;
#pragma unroll 1
  for (int32_t from = begin + each * 32; from < end; from += each * 32) all += count(from);
  all = __reduce_add_sync(ptx::kFullMask, all);
  // Winners side by side (sorted rows, plateaus) would be left to a few lanes: then a word a lane and turn.
  if (each > 1 && (static_cast<int32_t>(all) > kRoom - 3 || __reduce_max_sync(ptx::kFullMask, bits) > kManyBits)) {
    each = 1;
    bits = count(begin);
  }
  const int32_t turn = each * 32;  // words
  if (kWarps > 1) {
    if (lane == 0) warp_counts[warp] = all;
    __syncthreads();
    slot += static_cast<int32_t>(warp_sum_first(warp_counts, warp, lane));
  }
  uint32_t* stage = stages + warp * kRoom;
#pragma unroll 1
  for (int32_t from = begin; from < end; from += turn) {
    if (from != begin) bits = count(from);
    const int32_t inclusive = static_cast<int32_t>(warp_inclusive_sum(bits, lane)),
                  total = __shfl_sync(ptx::kFullMask, inclusive, 31);
    const int32_t own = from + lane * each, last = own + each < end ? own + each : end;
#pragma unroll 1
    for (int32_t done = 0; done < total;) {  // once, unless the stage has no room for all lanes' positions
      const int32_t lead = output.lead(slot), behind = inclusive - done;
      const bool now = behind > 0 && lead + behind <= kRoom;
      const auto held =
          static_cast<int32_t>(__reduce_max_sync(ptx::kFullMask, now ? static_cast<uint32_t>(behind) : 0u));
      if (now && bits != 0) {
        const uint32_t first = static_cast<uint32_t>(slice.first + last) * 32u - static_cast<uint32_t>(slice.shift);
        ptx::BitWalk walk{0u, first + output.add(), ptx::smem_address(bitmap + last),
                          ptx::smem_address(stage + lead + behind)};
        const uint32_t start = ptx::smem_address(bitmap + own);
#pragma unroll 1
        do ptx::take_three_bits(walk);
        while (walk.word != 0 || walk.from > start);
      }
      __syncwarp();
      output.put_staged(slot, lead, stage, held, lane);
      __syncwarp();
      slot += held;
      done += held;
    }
  }
}

}  // namespace dsa
