// The decode kernel for longer rows: a row is one cluster of blocks, or one block, or blocks spread over the device.
//
//  1. A sample of the row, the same in every block of it, gives a bracket (bracket.cuh): a score that is hardly ever
//  above the k-th one (`lo`), and one that is hardly ever below it.
//  2. Each block streams its slice and lists what is not below `lo`, in order of position: a prefix sum and a barrier a
//  batch of kPer scores a thread.
//  3. Each block of a cluster sends the listed scores to all other blocks of the row, one bulk copy each, and finds the
//  exact k-th score among them, all blocks redundantly: a histogram of the bracket, and the crossing bin ranked all
//  against all. A spread row's lists meet in the block that comes last (spread.cuh).
//  4. What the blocks before this one take is counted from their scores; the own list is written from there on.
// A row whose bracket misses, whose list overflows or whose crossing bin is crowded goes to the exact path (exact.cuh).
#pragma once
#include "bracket.cuh"
#include "groups.cuh"
#include "short.cuh"
#include "spread.cuh"

namespace dsa {

// The row's other way: right for every row.
template <class C>
__device__ __noinline__ void other_way(const Args& a) {
  ptx::wait_copies();
  ptx::row_sync<C::kMulti>();  // it uses the same memory
  exact_path<C>(a);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) split_kernel(const __grid_constant__ Args a) {
  using E = typename C::E;
  using Bits = typename E::Bits;
  constexpr bool kMulti = C::kMulti, kSpread = C::kSpread;
  auto& shared = *reinterpret_cast<SplitShared<C>*>(ptx::dynamic_smem());
  KthShared& s = shared.kth;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const uint32_t rank = kSpread ? blockIdx.x % static_cast<uint32_t>(a.cluster) : block_rank<C>();
  const int32_t blocks = kMulti || kSpread ? a.cluster : 1;
  ptx::pdl_launch_dependents();
  if (kMulti) {
    if (tid == 0) ptx::barrier_init(&shared.arrived, static_cast<uint32_t>(blocks - 1));
    ptx::cluster_arrive_relaxed();  // waited for before anything is sent
  }
#pragma unroll
  for (int i = 0; i < Bins::kFine / C::kThreads; ++i) s.hist[i * C::kThreads + tid] = 0;
  if (tid == 0) {
    s.member_count = 0;
    shared.lower = 0;
  }
  const int32_t index = row_index<C>(a);
  ptx::pdl_wait();

  int32_t n;
  const Bits* window = static_cast<const Bits*>(a.scores) + index * a.row_stride;
  uint64_t where;  // Row::where
  Sample<C> sample;
  if (a.simple_room >= 0) {
    const int32_t length = static_cast<const int32_t*>(a.lengths.data)[index * a.lengths.stride];
    // Before the length is known, which is another trip to memory; rows of one block wait for bandwidth, not for that.
    if (kMulti && a.simple_room >= kMinSampled) sample.load(window, a.simple_room, vector_shift<E>(window));
    const int64_t table_row = a.form == kPaged ? simple_table_row(a, index) : 0;
    n = simple_length(a, length, table_row);
    where = a.form == kRagged ? static_cast<uint64_t>(load_index(a.out_offsets, index, 0))
                              : reinterpret_cast<uint64_t>(a.page_table + table_row * a.table_stride);
  } else {
    const Row<E> row(a, index);
    window = row.window;
    n = row.n;
    where = row.where;
  }
  if (tid == 0) s.where = where;
  if (n <= a.k || n < kMinSampled || n > kMaxSplit) {
    if (kMulti) ptx::cluster_wait();
    if (n <= a.k) {
      short_row<C>(a, rank, blocks);
    } else if (!kSpread || rank == 0) {
      other_way<C>(a);
    }
    return;
  }
  // By the blocks of the row: exact for small x, else it may be one too many.
  const auto divide = [&](uint32_t x) { return blocks > 1 ? __umulhi(x, a.cluster_magic) : x; };
  // The block's slice in groups of four, aligned as memory is; whole lines of 128 bytes.
  const int32_t shift = vector_shift<E>(window);
  const uint32_t groups = (static_cast<uint32_t>(n) + static_cast<uint32_t>(shift) + 3u) >> 2;
  const uint32_t per = kMulti || kSpread ? (divide(groups - 1u) + 32u) & ~31u : groups;
  const uint32_t slice_first = rank * per < groups ? rank * per : groups,
                 slice_last = slice_first + per < groups ? slice_first + per : groups;
  const int32_t begin = static_cast<int32_t>(4u * slice_first) - shift,
                slice_end = static_cast<int32_t>(4u * slice_last) - shift, end = slice_end < n ? slice_end : n;

  if (kMulti && a.simple_room >= 0) {
    sample.fit(window, n, a.simple_room, shift);
  } else {
    sample.load(window, n, shift);
  }
  Portion<C> place(begin);
  Bits ahead[C::kPer];
  hold<C>(ahead, window, end, place);
  if (tid == 0) shared.first_page = kNoPages;
  if (a.form == kPaged && end > begin) {
    const uint32_t first = page_of(a, static_cast<uint32_t>(begin > 0 ? begin : 0)),
                   pages = page_of(a, static_cast<uint32_t>(end - 1)) - first + 1;
    if (pages <= C::kPages) {
      if (tid == 0) shared.first_page = first;
      const int32_t* entries = reinterpret_cast<const int32_t*>(where) + first;
#pragma unroll 1
      for (uint32_t i = tid; i < pages; i += C::kThreads) ptx::copy_async(&shared.pages[i], entries + i);
    }
  }
  float lo;
  if (!bracket_of<C>(a, shared, sample, n, lo)) {
    if (kMulti) ptx::cluster_wait();
    if (!kSpread || rank == 0) other_way<C>(a);
    return;
  }

  // The list.
  uint32_t run = 0;
  {
    const uint32_t scores_at = ptx::smem_address(shared.scores);
    constexpr uint32_t kBefore = offsetof(SplitShared<C>, scores) - offsetof(SplitShared<C>, positions);
    const int32_t batches = end > begin ? (end - begin + C::kBatchScores - 1) / C::kBatchScores : 0;
#pragma unroll 1
    for (int32_t batch = 0; batch < batches; ++batch) {
      float x[C::kPer];
#pragma unroll
      for (int i = 0; i < C::kPer; ++i) x[i] = E::value(ahead[i]);
      const Portion<C> here = place;
      place.first += C::kBatchScores;
      if (batch + 1 < batches) hold<C>(ahead, window, end, place);
      GroupCounts counts{0, 0}, all;
      count_groups<C>(counts, x, lo);
      uint32_t* warp_counts = batch & 1 ? s.wb : s.wa;
      const uint32_t before = static_cast<uint32_t>(slots_before<C>(counts, all, warp_counts));
      const uint32_t total = warp_sum_first(warp_counts, C::kWarps, lane);
      if (run + total <= C::kEntries) {
        uint32_t at = scores_at + 4u * (run + before);
#pragma unroll
        for (int j = 0; j < C::kVectors; ++j) {
          if (all[j]) {
            uint32_t cursor = at + 4u * counts[j];
#pragma unroll
            for (int d = 0; d < 4; ++d)
              ptx::append_pair_at_least<kBefore>(cursor, x[4 * j + d], lo, static_cast<uint32_t>(here.of(4 * j + d)));
          }
          at += 4u * all[j];
        }
      }
      run += total;
    }
  }

  bool results = false;  // the list holds results instead of positions
  if constexpr (kSpread) {
    if (!gather_lists<C>(a, shared, index, rank, run, window, n, results)) return;
  }

  // All lists of the row.
  uint32_t row_count = run;
  bool over = run > C::kEntries;
  if constexpr (kMulti) {
    const Regions<C> regions(a, shared, rank);
    const uint32_t cap = static_cast<uint32_t>(a.region_cap);
    if (tid == 0) *regions.own = run;
    ptx::fence_async();
    __syncthreads();
    ptx::cluster_wait();
    if (tid < blocks && static_cast<uint32_t>(tid) != rank) {
      const uint32_t bytes = 16u + (run <= cap && !over ? (run * 4u + 15u) & ~15u : 0u);
      ptx::send(static_cast<uint32_t>(tid), regions.sent(rank), regions.own, bytes, &shared.arrived);
    }
    ptx::barrier_wait(&shared.arrived);
    const uint32_t count = lane < blocks ? regions.count(static_cast<uint32_t>(lane)) : 0u;
    row_count = __reduce_add_sync(ptx::kFullMask, count < kTooMany ? count : kTooMany);
    over = __any_sync(ptx::kFullMask, count > cap || count > C::kEntries);
  } else {
    __syncthreads();
  }
  if (over || row_count < static_cast<uint32_t>(a.k)) {
    other_way<C>(a);
    return;
  }
  if (kMulti) ptx::cluster_arrive_relaxed();  // this block has got all; none may end before all have

  // f(score, place in the row's order) for all listed scores of the row: a warp a region, or several warps, or all.
  // Four at a time, so that their way is not as long as four; NaN fills up.
  const uint32_t mine =
      kMulti ? static_cast<uint32_t>(warp) - divide(static_cast<uint32_t>(warp)) * blocks : 0u;  // region
  const auto visit = [&](uint32_t first, uint32_t count, uint32_t step, auto&& score, auto&& f) {
#pragma unroll 1
    for (uint32_t i = first; i < count; i += 4u * step) {
      float x[4];
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u)
        x[u] = i + u * step < count ? score(i + u * step) : Float32::value(Float32::kNaN);
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) f(x[u], mine << 16 | (i + u * step));
    }
  };
  const auto each = [&](auto&& f) {
    if constexpr (kMulti) {
      const Regions<C> regions(a, shared, rank);
      const float* scores = regions.scores(mine);
      visit(
          divide(static_cast<uint32_t>(warp)) * 32u + lane, regions.count(mine),
          32u * divide(static_cast<uint32_t>(C::kWarps) - mine + blocks - 1u), [&](uint32_t i) { return scores[i]; },
          f);
    } else {
      visit(static_cast<uint32_t>(tid), run, C::kThreads, [&](uint32_t i) { return shared.scores[i]; }, f);
    }
  };
  const Bins bins(shared.bottom, shared.top);
  const auto bin_of_score = [&](float x) { return fmaxf(bins.of(x), Bins::kBase); };
  const uint32_t base = ptx::smem_address(s.hist) - (__float_as_uint(Bins::kBase) << 2);
  each([&](float x, uint32_t) { ptx::count(base + (__float_as_uint(bin_of_score(x)) << 2)); });
  __syncthreads();
  const int32_t ranks[1] = {a.k};
  find_crossings<C>(s, ranks);
  const Found f = s.found[0];
  if (f.count > kTieCap || f.bin == Bins::kRest || !Bins::fit(shared.bottom, shared.top)) {
    if (kMulti) ptx::cluster_wait();
    other_way<C>(a);
    return;
  }
  const float crossing = Bins::number(f.bin);
  each([&](float x, uint32_t order) {
    ptx::append(bin_of_score(x) == crossing, &s.member_count, s.members, __float_as_uint(x), order);
  });
  ptx::wait_copies();
  __syncthreads();
  const bool largest = a.largest != 0;
  rank_members<C>(s, f.count, a.k - f.above, largest);
  __syncthreads();
  const Threshold t = threshold_of(s);
  const auto taken = [&](float x, uint32_t order) {
    return x > t.score || (x == t.score && (!t.cut || (largest ? order >= static_cast<uint32_t>(t.tie)
                                                               : order <= static_cast<uint32_t>(t.tie))));
  };
  if (kMulti) {
    uint32_t lower = 0;
    if (mine < rank) each([&](float x, uint32_t order) { lower += taken(x, order); });
    lower = __reduce_add_sync(ptx::kFullMask, lower);
    if (lane == 0 && lower) atomicAdd(&shared.lower, lower);
  }
  // A warp owns a contiguous part of the own list.
  const uint32_t steps = (run + C::kThreads - 1u) / C::kThreads,
                 part = static_cast<uint32_t>(warp) * steps * 32u + lane;
  const uint32_t own_order = kMulti ? rank << 16 : 0u;
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t u = 0; u < steps; ++u) {
    const uint32_t i = part + u * 32u;
    count += i < run && taken(shared.scores[i], own_order | i);
  }
  count = __reduce_add_sync(ptx::kFullMask, count);
  if (lane == 0) s.wa[warp] = count;
  __syncthreads();
  uint32_t slot = shared.lower + warp_sum_first(s.wa, warp, lane);
  const Row<E> row(window, n, s.where);
  const Output<E> output(a, row, index);
  const bool direct = !kSpread && shared.first_page != kNoPages && !output.positions && !output.scores && !a.raw;
  const StagedPages staged{shared.pages, shared.first_page};
#pragma unroll 1
  for (uint32_t u = 0; u < steps; ++u) {
    const uint32_t i = part + u * 32u;
    const bool take = i < run && taken(shared.scores[i], own_order | i);
    const uint32_t ballot = __ballot_sync(ptx::kFullMask, take);
    if (take) {
      const uint32_t p = static_cast<uint32_t>(shared.positions[i]);
      const int32_t to = static_cast<int32_t>(slot + __popc(ballot & ((1u << lane) - 1u)));
      if (results) {
        output.out[to] = static_cast<int32_t>(p);
      } else if (direct) {
        output.out[to] = static_cast<int32_t>(staged.result(a, p));
      } else {
        output.put(to, p);
      }
    }
    slot += __popc(ballot);
  }
  count_path<C>(a, kSpread ? 0u : rank, kFast);
  if (kMulti) ptx::cluster_wait();
}

}  // namespace dsa
