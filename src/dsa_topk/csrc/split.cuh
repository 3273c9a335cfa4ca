// The decode kernel for longer rows: a row is one cluster of blocks, or one block, or blocks spread over the device.
//
//  1. A sample of the row, the same in every block of it, gives a bracket: a score that is hardly ever above the k-th
//  one (`lo`), and one that is hardly ever below it (`hi`).
//  2. Each block streams its slice and lists what is not below `lo`, in order of position: a prefix sum and a barrier a
//  batch of kPer scores a thread.
//  3. Each block of a cluster sends the listed scores to all blocks of the row, one bulk copy each, and finds the exact
//  k-th score among them, all blocks redundantly: a histogram between `lo` and `hi`, and the crossing bin ranked all
//  against all. A spread row's lists meet in the block that comes last (spread.cuh).
//  4. What the blocks before this one take is counted from their scores; the own list is written from there on.
// A row whose bracket misses, whose list overflows or whose crossing bin is crowded goes to the exact path (exact.cuh).
#pragma once
#include "groups.cuh"
#include "short.cuh"
#include "spread.cuh"

namespace dsa {

// Where the bracket of a row's k-th score lies in a sample of it, and where bins for what is listed may begin (`top`);
// false: the sample says nothing.
template <class C>
__device__ __forceinline__ bool bracket_of(const Args& a, KthShared& s, const float (&v)[4 * C::kQuads], int32_t n,
                                           float& lo, float& hi, float& top) {
  constexpr int kN = 4 * C::kQuads;
  constexpr float kTotal = static_cast<float>(C::kThreads * kN);
  float most = v[0], least = v[0];
#pragma unroll
  for (int i = 1; i < kN; ++i) {
    most = fmaxf(most, v[i]);
    least = fminf(least, v[i]);
  }
  const float share = __fdividef(static_cast<float>(a.k), static_cast<float>(n)), rank = share * kTotal,
              sigma = a.margin * ptx::sqrt_approx(rank * (1.0f - share)) + 2.0f;
  const int32_t ranks[2] = {static_cast<int32_t>(rank + sigma), static_cast<int32_t>(rank - sigma)};
  // As in kth.cuh's pilot, for the lower end of the bracket: groups are a thread's scores.
  float missed = 1.0f - (rank + sigma) * (1.0f / kTotal);
  if (!(missed > 0.0f)) return false;
#pragma unroll
  for (int g = 1; g < kN; g *= 2) missed *= missed;
  const float low = missed * static_cast<float>(C::kThreads) >= 24.0f ? most : least;
  uint32_t low_key = low == low ? key_of(low) : 0xffffffffu, top_key = key_of(most);
  block_ends<C::kWarps>(s.wa, s.wb, low_key, top_key);
  float bottom = float_of(low_key), head = float_of(top_key);
  if (!Bins::fit(bottom, head)) return false;
  if (threadIdx.x == 0) s.score = head;  // not kept: registers are short
  const uint32_t base = ptx::smem_address(s.hist) - (__float_as_uint(Bins::kBase) << 2);
#pragma unroll 1
  for (int round = 0;; ++round) {
    const Bins bins(bottom, head);
#pragma unroll
    for (int i = 0; i < kN; ++i) ptx::count(base + (__float_as_uint(fmaxf(bins.of(v[i]), Bins::kBase)) << 2));
    __syncthreads();
    find_crossings<C>(s, ranks);
    if (s.found[0].bin == Bins::kRest) return false;
#pragma unroll
    for (int i = 0; i < Bins::kFine / C::kThreads; ++i) s.hist[threadIdx.x * (Bins::kFine / C::kThreads) + i] = 0;
    if (s.found[0].count <= C::kThreads * kN / 32 || round == 3) break;
    // Many samples in one bin: masks or outliers stretched the range. Closer, with a bin to spare.
    const float width = bins.width(), next = head - static_cast<float>(s.found[0].bin + 2) * width;
    if (ranks[1] > 0) head -= static_cast<float>(s.found[1].bin) * width;
    bottom = next > bottom ? next : bottom;
    if (!Bins::fit(bottom, head)) return false;
    __syncthreads();  // the bins are cleared, s.found was read
  }
  const float width = Bins(bottom, head).width();
  lo = head - static_cast<float>(s.found[0].bin + 1) * width;
  hi = ranks[1] > 0 ? head - static_cast<float>(s.found[1].bin) * width : INFINITY;
  top = s.score;
  // Of a row much longer than its sample many scores may lie above all sampled ones, as far again as these reach.
  if (hi > top) top += top - lo;
  return true;
}

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
    if (tid == 0) ptx::barrier_init(&shared.arrived, static_cast<uint32_t>(blocks));
    ptx::cluster_arrive();  // waited for before anything is sent
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
  if (a.simple_room >= 0) {
    const int32_t length = static_cast<const int32_t*>(a.lengths.data)[index * a.lengths.stride];
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

  Bits sampled[4 * C::kQuads];
  {
    const uint32_t first = shift ? 1u : 0u,
                   whole = ((static_cast<uint32_t>(n) + static_cast<uint32_t>(shift)) >> 2) - first;
#pragma unroll
    for (int q = 0; q < C::kQuads; ++q) {
      // One of the groups of an equal part of the row, at random.
      const uint32_t part = static_cast<uint32_t>(q * C::kThreads + tid);
      constexpr uint32_t kSpan = 0xffffffffu / (C::kThreads * C::kQuads);
      uint32_t h = part * 0x9E3779B1u;
      h = (h ^ (h >> 15)) * 0x85EBCA6Bu;
      const uint32_t group = first + __umulhi(part * kSpan + __umulhi(h, kSpan), whole);
      ptx::ld_keep_four(window + (static_cast<int32_t>(4u * group) - shift), &sampled[4 * q]);
    }
  }
  Portion<C> place(begin);
  Bits ahead[C::kPer];
  hold<C>(ahead, window, end, place);
  bool staged = false;
  uint32_t first_page = 0;
  if (a.form == kPaged && end > begin) {
    first_page = page_of(a, static_cast<uint32_t>(begin > 0 ? begin : 0));
    const uint32_t pages = page_of(a, static_cast<uint32_t>(end - 1)) - first_page + 1;
    staged = pages <= C::kPages;
    if (staged) {
      const int32_t* entries = reinterpret_cast<const int32_t*>(where) + first_page;
#pragma unroll 1
      for (uint32_t i = tid; i < pages; i += C::kThreads) ptx::copy_async(&shared.pages[i], entries + i);
    }
  }
  float lo, hi, top;
  {
    float v[4 * C::kQuads];
#pragma unroll
    for (int i = 0; i < 4 * C::kQuads; ++i) v[i] = E::value(sampled[i]);
    if (!bracket_of<C>(a, s, v, n, lo, hi, top)) {
      if (kMulti) ptx::cluster_wait();
      if (!kSpread || rank == 0) other_way<C>(a);
      return;
    }
  }

  // The list.
  uint32_t run = 0;
  {
    const uint32_t scores_at = ptx::smem_address(shared.scores);
    constexpr uint32_t kPositionsBefore = offsetof(SplitShared<C>, scores) - offsetof(SplitShared<C>, positions);
    const int32_t batches = (slice_end - begin + C::kBatchScores - 1) / C::kBatchScores;
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
              ptx::append_pair_at_least<kPositionsBefore>(cursor, x[4 * j + d], lo,
                                                          static_cast<uint32_t>(here.of(4 * j + d)));
          }
          at += 4u * all[j];
        }
      }
      run += total;
    }
  }

  bool results = false;  // the list holds results instead of positions
  if (kSpread) {
    if (!gather_lists<C>(a, shared, index, rank, run, window, n, staged, first_page, results)) return;
  }

  // All lists of the row.
  const Region own{shared.head};
  const uint32_t* regions = reinterpret_cast<const uint32_t*>(&shared + 1);
  const uint32_t pitch = static_cast<uint32_t>(a.region_cap) + 4u;
  const auto region = [&](uint32_t r) { return kMulti ? Region{regions + r * pitch} : own; };
  if (tid == 0) shared.head[0] = run;
  uint32_t row_count = run;
  bool over = run > C::kEntries;
  if (kMulti) {
    ptx::fence_async();
    __syncthreads();
    ptx::cluster_wait();
    if (tid < blocks) {
      const bool fits = run <= static_cast<uint32_t>(a.region_cap) && !over;
      ptx::send(static_cast<uint32_t>(tid), const_cast<uint32_t*>(regions) + rank * pitch, shared.head,
                16u + (fits ? (run * 4u + 15u) & ~15u : 0u), &shared.arrived);
    }
    ptx::barrier_wait(&shared.arrived);
    const uint32_t count = lane < blocks ? region(static_cast<uint32_t>(lane)).count() : 0u;
    row_count = __reduce_add_sync(ptx::kFullMask, count < 0x01000000u ? count : 0x01000000u);
    over = __any_sync(ptx::kFullMask, count > static_cast<uint32_t>(a.region_cap) || count > C::kEntries);
  } else {
    __syncthreads();
  }
  if (over || row_count < static_cast<uint32_t>(a.k)) {
    other_way<C>(a);
    return;
  }
  if (kMulti) ptx::cluster_arrive();  // this block has got all; none may end before all have

  // f(score, place in the row's order) for all listed scores of the row: a warp a region, or several warps, or all.
  // Four at a time, so that their way is not as long as four; NaN fills up.
  const uint32_t mine =
      kMulti ? static_cast<uint32_t>(warp) - divide(static_cast<uint32_t>(warp)) * blocks : 0u;  // region
  const auto each = [&](auto&& f) {
    const float* scores = region(mine).scores();
    const uint32_t count = kMulti ? region(mine).count() : run,
                   step = kMulti ? 32u * divide(static_cast<uint32_t>(C::kWarps) - mine + blocks - 1u) : C::kThreads;
    uint32_t i = kMulti ? divide(static_cast<uint32_t>(warp)) * 32u + lane : static_cast<uint32_t>(tid);
#pragma unroll 1
    for (; i < count; i += 4u * step) {
      float x[4];
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u)
        x[u] = i + u * step < count ? scores[i + u * step] : Float32::value(Float32::kNaN);
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) f(x[u], mine << 16 | (i + u * step));
    }
  };
  const Bins bins(lo, hi < top ? hi : top);
  const auto bin_of_score = [&](float x) { return fmaxf(bins.of(x), Bins::kBase); };
  const uint32_t base = ptx::smem_address(s.hist) - (__float_as_uint(Bins::kBase) << 2);
  each([&](float x, uint32_t) { ptx::count(base + (__float_as_uint(bin_of_score(x)) << 2)); });
  __syncthreads();
  const int32_t ranks[1] = {a.k};
  find_crossings<C>(s, ranks);
  const Found f = s.found[0];
  if (f.count > kTieCap || !Bins::fit(lo, hi < top ? hi : top)) {
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
    count += i < run && taken(own.scores()[i], own_order | i);
  }
  count = __reduce_add_sync(ptx::kFullMask, count);
  if (lane == 0) s.wa[warp] = count;
  __syncthreads();
  uint32_t slot = shared.lower + warp_sum_first(s.wa, warp, lane);
  const Row<E> row(window, n, s.where);
  const Output<E> output(a, row, index);
  const bool direct = !output.positions && !output.scores && !a.raw;
#pragma unroll 1
  for (uint32_t u = 0; u < steps; ++u) {
    const uint32_t i = part + u * 32u;
    const bool take = i < run && taken(own.scores()[i], own_order | i);
    const uint32_t ballot = __ballot_sync(ptx::kFullMask, take);
    if (take) {
      const uint32_t p = static_cast<uint32_t>(shared.positions[i]);
      const int32_t to = static_cast<int32_t>(slot + __popc(ballot & ((1u << lane) - 1u)));
      if (results) {
        output.out[to] = static_cast<int32_t>(p);
      } else if (direct && staged && !kSpread) {
        output.out[to] = static_cast<int32_t>(StagedPages{shared.pages, first_page}.result(a, p));
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
