// How a block of a cluster lists a long slice (split.cuh): no barrier and no prefix sum while it streams.
//
// Each thread lists the scores it meets that are not below a bound in a column of its own. A slice is granules of 128
// neighbouring scores, four a lane, dealt to the warps in turn: whatever lies close together is spread over many
// columns. What is listed is few, and is put in order of position afterwards: a bitmap of 65536 positions at a time,
// which takes the histogram's place, says where each entry goes.
#pragma once
#include "lists.cuh"

namespace dsa {

template <class C>
struct Columns {
  using E = typename C::E;
  using Bits = typename E::Bits;
  static constexpr int kRing = 8;  // loads of four scores that a thread has under way
  static constexpr int32_t kNoEdge = 0x7fffffff;
  static constexpr int32_t kNext = C::kWarps * 128;  // scores from a granule of a warp to its next one
  static constexpr int kStep = C::kThreads * 8;      // bytes from an entry of a column to the next one

  const Bits* at;  // this lane's scores of the granule in ring[0]
  int32_t place;   // the position of the first of them
  int32_t left;    // whole granules of this warp
  int32_t edge;    // position of this lane's scores in the partial granule that is this warp's, or kNoEdge
  Bits ring[kRing][4], edges[4];

  // Asks for the first scores of the slice [begin, end); begin may be negative, by the misalignment of the row's start.
  __device__ __forceinline__ void load(const Bits* window, int32_t begin, int32_t end) {
    const int32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int32_t head = begin < 0 ? 1 : 0, tail = (end - begin) >> 7;
    left = tail - head > warp ? (tail - head - warp + C::kWarps - 1) / C::kWarps : 0;
    place = begin + (head + warp) * 128 + lane * 4;
    at = window + place;
#pragma unroll
    for (int u = 0; u < kRing; ++u) {
      if (u < left) ptx::ld_stream_four(at + u * kNext, ring[u]);
    }
    const bool first = warp == 0 && head == 1, last = warp == C::kWarps - 1 && tail * 128 < end - begin;
    edge = first || last ? begin + (first ? 0 : tail * 128) + lane * 4 : kNoEdge;
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      edges[d] = E::kNaN;
      if (edge != kNoEdge && edge + d >= 0 && edge + d < end) edges[d] = ptx::ld_stream(window + edge + d);
    }
  }

  // Tests four scores.
  __device__ __forceinline__ void test(SplitShared<C>& shared, const Bits (&bits)[4], int32_t position, float lo,
                                       uint32_t start, uint32_t& cursor) const {
    float x[4];
#pragma unroll
    for (int d = 0; d < 4; ++d) x[d] = E::value(bits[d]);
    if (!__any_sync(ptx::kFullMask, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= lo)) return;
#pragma unroll
    for (int d = 0; d < 4; ++d)
      ptx::append_entry_at_least<kStep>(cursor, x[d], lo, static_cast<uint32_t>(position + d));
    const uint32_t full = start + C::kColumn * kStep;
    if (__any_sync(ptx::kFullMask, cursor > full)) {
#pragma unroll 1
      while (cursor > full) {
        cursor -= kStep;
        const uint32_t slot = atomicAdd(&shared.of_long.spilled, 1u);
        if (slot < C::kSpill) shared.of_long.spill[slot] = shared.of_long.columns[(cursor - start) / 8 + threadIdx.x];
      }
      __syncwarp();
    }
  }

  // Lists the slice's scores >= lo; the number of entries in this thread's column.
  __device__ __forceinline__ uint32_t fill(SplitShared<C>& shared, float lo) {
    const uint32_t start = ptx::smem_address(shared.of_long.columns + threadIdx.x);
    uint32_t cursor = start;
#pragma unroll 1
    while (left > 0) {
#pragma unroll
      for (int u = 0; u < kRing; ++u) {
        if (u < left) {
          test(shared, ring[u], place + u * kNext, lo, start, cursor);
          if (u + kRing < left) ptx::ld_stream_four(at + (u + kRing) * kNext, ring[u]);
        }
      }
      left -= kRing;
      at += kRing * kNext;
      place += kRing * kNext;
    }
    if (edge != kNoEdge) test(shared, edges, edge, lo, start, cursor);
    return (cursor - start) / kStep;
  }
};

// Puts the entries of all columns into the block's list, in order of position; `entries` are in this thread's one, and
// all positions in [begin, end). Returns how many there are; more than the list holds are not written. The list is
// complete after a barrier.
template <class C>
__device__ __forceinline__ uint32_t order_columns(SplitShared<C>& shared, uint32_t entries, int32_t begin,
                                                  int32_t end) {
  constexpr uint32_t kWords = Bins::kFine, kPer = kWords / C::kThreads;
  KthShared& s = shared.kth;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const uint32_t words = (static_cast<uint32_t>(end - begin) + 31u) >> 5, bitmap = ptx::smem_address(s.hist);
  __syncthreads();  // all is spilled that will be
  const uint32_t spilled = shared.of_long.spilled;
  if (spilled > C::kSpill) return kTooMany;
  uint32_t done = 0;  // listed from the parts before
#pragma unroll 1
  for (uint32_t part = 0; part < words; part += kWords) {
    // f(entry, bit, word of the bitmap) for the thread's entries of this part
    const auto each = [&](auto&& f) {
      const auto visit = [&](const Entry& e) {
        const uint32_t bit = e.place - static_cast<uint32_t>(begin), word = (bit >> 5) - part;
        if (word < kWords) f(e, bit & 31u, word);
      };
#pragma unroll 1
      for (uint32_t i = 0; i < entries; ++i) visit(shared.of_long.columns[i * C::kThreads + tid]);
#pragma unroll 1
      for (uint32_t i = tid; i < spilled; i += C::kThreads) visit(shared.of_long.spill[i]);
    };
    each([&](const Entry&, uint32_t bit, uint32_t word) { ptx::set_bits(bitmap + 4u * word, 1u << bit); });
    __syncthreads();
    uint32_t count[kPer], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPer; ++i) {
      count[i] = static_cast<uint32_t>(__popc(s.hist[tid * kPer + i]));
      sum += count[i];
    }
    const uint32_t inclusive = warp_inclusive_sum(sum, lane);
    if (lane == 31) s.wa[warp] = inclusive;
    __syncthreads();
    uint32_t at = done + warp_sum_first(s.wa, warp, lane) + inclusive - sum;
    done += warp_sum_first(s.wa, C::kWarps, lane);
#pragma unroll
    for (uint32_t i = 0; i < kPer; ++i) {
      shared.of_long.before[tid * kPer + i] = static_cast<uint16_t>(at);  // a full list has 4096 entries
      at += count[i];
    }
    __syncthreads();
    each([&](const Entry& e, uint32_t bit, uint32_t word) {
      const uint32_t to =
          shared.of_long.before[word] + static_cast<uint32_t>(__popc(s.hist[word] & ((1u << bit) - 1u)));
      if (to < C::kEntries) {
        shared.scores[to] = __uint_as_float(e.value);
        shared.positions[to] = static_cast<int32_t>(e.place);
      }
    });
    __syncthreads();
    clear_bins<C>(s);
    if (part + kWords < words) __syncthreads();
  }
  return done;
}

}  // namespace dsa
