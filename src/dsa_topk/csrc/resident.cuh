// The decode kernel for rows of up to 16384 scores: one block a row, which it reads once and keeps in registers.
//
//  1. Loads the row, while the row's length and page-table entries are on their way.
//  2. Finds the exact k-th score (kth.cuh).
//  3. Writes the positions of the scores above it, ascending: two prefix sums, no staging.
// A row with fewer than k scores that are no NaN goes to exact.cuh.
//
// Everything here is latency: one row is a chain of dependent steps on 8 to 32 warps (docs/kernel-notes.md).
#pragma once
#include "groups.cuh"
#include "kth.cuh"
#include "short.cuh"

namespace dsa {

template <class C>
struct ResidentShared {
  int32_t pages[C::kThreads];  // entries of the row's page table, where they are no more than that
  uint32_t page_count;         // how many lie there; 0: look them up
  // In the end the row's results, k of them, take the histogram's place, which is the end of this: as much memory as
  // the greater of the two is behind it.
  KthShared kth;
};

// Writes `count` results that lie in shared memory to the row's first slots: as they are (`direct`), or positions.
template <class C>
__device__ __forceinline__ void write_row(const Args& a, int32_t index, const uint32_t* results, bool direct) {
  const int tid = threadIdx.x;
  int32_t* out = a.out + index * a.out_stride;
  if (direct && ((reinterpret_cast<uint64_t>(out) | static_cast<uint32_t>(a.k * 4)) & 15u) == 0) {
#pragma unroll 1
    for (int32_t i = tid; i < a.k >> 2; i += C::kThreads) ptx::copy_four(out + 4 * i, results + 4 * i);
  } else if (direct) {
#pragma unroll 1
    for (int32_t i = tid; i < a.k; i += C::kThreads) out[i] = static_cast<int32_t>(results[i]);
  } else {
    const Row<typename C::E> row(a, index);
    const Output<typename C::E> output(a, row, index);
#pragma unroll 1
    for (int32_t i = tid; i < a.k; i += C::kThreads) output.put(i, results[i]);
  }
}

// Forgets the scores equal to the threshold that are not taken, so that x >= t.score says what is.
template <class C>
__device__ __forceinline__ void drop_ties(float (&x)[C::kPer], const Portion<C>& place, const Threshold& t,
                                          bool largest) {
  const int32_t sign = largest ? -1 : 1, tie = sign * t.tie;
#pragma unroll
  for (int i = 0; i < C::kPer; ++i) {
    if (x[i] == t.score && sign * place.of(i) > tie) x[i] = C::E::value(C::E::kNaN);
  }
}

// The results of each group's first score; the others follow it. True: what is written is final, because four
// neighbours share their page and its entry is at hand. Else positions, to be looked up one by one.
template <class C>
__device__ __forceinline__ bool results_of(const Args& a, const Portion<C>& place, uint64_t where, const int32_t* pages,
                                           uint32_t page_count, uint32_t (&value)[C::kVectors]) {
#pragma unroll
  for (int j = 0; j < C::kVectors; ++j) value[j] = static_cast<uint32_t>(place.of(4 * j));
  if (a.out_positions || a.out_scores || a.raw) return false;
  if (a.form != kPaged) {
    const uint32_t offset = static_cast<uint32_t>(where);
#pragma unroll
    for (int j = 0; j < C::kVectors; ++j) value[j] += offset;
    return true;
  }
  if (page_count == 0 || (static_cast<uint32_t>(place.first | a.page_size) & 3u)) return false;
  const uint32_t last = page_count - 1u;
#pragma unroll
  for (int j = 0; j < C::kVectors; ++j) {
    uint32_t page = page_of(a, value[j]);
    page = page < last ? page : last;  // groups beyond the row have none
    value[j] += (static_cast<uint32_t>(pages[page]) - page) * static_cast<uint32_t>(a.page_size);
  }
  return true;
}

// Writes the results of the scores x >= score.
template <class C>
__device__ __forceinline__ void finish_held(const Args& a, int32_t index, const float (&x)[C::kPer], float score,
                                            KthShared& s, const uint32_t (&value)[C::kVectors], bool direct) {
  GroupCounts counts{0, 0}, all;
  count_groups<C>(counts, x, score);
  if (threadIdx.x == 0) s.score = score;
  const int32_t slot = slots_before<C>(counts, all, s.wb);
  // Compared anew, with a score that the compiler does not know to be the same: it would keep kPer predicates
  // meanwhile.
  const float again = s.score;
  uint32_t at = ptx::smem_address(s.hist) + 4u * static_cast<uint32_t>(slot);
#pragma unroll
  for (int j = 0; j < C::kVectors; ++j) {
    uint32_t cursor = at + 4u * counts[j];
#pragma unroll
    for (int d = 0; d < 4; ++d) ptx::append_at_least(cursor, x[4 * j + d], again, value[j] + d);
    at += 4u * all[j];
  }
  __syncthreads();
  write_row<C>(a, index, s.hist, direct);
}

// This thread's scores, read again: the rare paths below are calls that never return, so that the kernel keeps no
// registers for them.
template <class C>
__device__ __forceinline__ void hold_again(float (&x)[C::kPer], const Row<typename C::E>& row,
                                           const Portion<C>& place) {
  typename C::E::Bits b[C::kPer];
  hold<C>(b, row.window, row.n, place);
  cut<C>(x, b, row.n, place);
}

// Finishes a row whose threshold is known.
template <class C>
__device__ __noinline__ void finish_row_at(const Args& a, Threshold t) {
  KthShared& s = reinterpret_cast<ResidentShared<C>*>(ptx::dynamic_smem())->kth;
  const int32_t index = row_index<C>(a);
  const Row<typename C::E> row(a, index);
  const Portion<C> place(-vector_shift<typename C::E>(row.window));
  float x[C::kPer];
  hold_again<C>(x, row, place);
  if (t.cut) drop_ties<C>(x, place, t, a.largest != 0);
  uint32_t value[C::kVectors];
  const bool direct = results_of<C>(a, place, row.where, nullptr, 0, value);
  finish_held<C>(a, index, x, t.score, s, value, direct);
}

// Finishes a row whose k-th score is the `need`-th of a crowd of scores in one bin between `low` and `top`, or lies
// below `low` (the last bin), or whose range has no bins (bin -1).
template <class C>
__device__ __noinline__ void crowded_held(const Args& a, float low, float top, int32_t bin, int32_t crowd,
                                          int32_t need) {
  if constexpr (C::kShort) {  // rounds keep as many numbers again as there are scores
    __syncthreads();          // it uses the same memory
    exact_path<C>(a);
    return;
  }
  KthShared& s = reinterpret_cast<ResidentShared<C>*>(ptx::dynamic_smem())->kth;
  __syncthreads();
  for (int i = threadIdx.x; i < Bins::kFine; i += C::kThreads) s.hist[i] = 0;
  if (threadIdx.x == 0) s.member_count = 0;
  uint32_t key[C::kPer], low_key = 1, high_key = key_of(top);
  Portion<C> place(0);
  int32_t n;
  {
    const Row<typename C::E> row(a, row_index<C>(a));
    n = row.n;
    place = Portion<C>(-vector_shift<typename C::E>(row.window));
    float x[C::kPer];
    hold_again<C>(x, row, place);
    if (bin >= 0) ends_of<C>(s, x, Bins(low, top), bin, low_key, high_key);
#pragma unroll
    for (int i = 0; i < C::kPer; ++i) key[i] = key_of(x[i]);
  }
  __syncthreads();
  Threshold t;
  Search<C> search{s, key, place, n, need, a.largest != 0};
  if (!search.find(low_key, high_key, bin == Bins::kRest ? -1 : crowd, t)) {
    __syncthreads();  // it uses the same memory
    exact_path<C>(a);
    return;
  }
  count_path<C>(a, 0, kSecondTry);
  finish_row_at<C>(a, t);
}

template <class C>
__device__ __forceinline__ void held_row(const Args& a) {
  using E = typename C::E;
  auto& shared = *reinterpret_cast<ResidentShared<C>*>(ptx::dynamic_smem());
  KthShared& s = shared.kth;
  const int tid = threadIdx.x;
  ptx::pdl_launch_dependents();
#pragma unroll
  for (int i = 0; i < Bins::kFine / C::kThreads; ++i) s.hist[i * C::kThreads + tid] = 0;
  if (tid == 0) s.member_count = 0;
  const int32_t index = row_index<C>(a);
  const typename E::Bits* window = static_cast<const typename E::Bits*>(a.scores) + index * a.row_stride;
  const int32_t* length_at = static_cast<const int32_t*>(a.lengths.data) + index * a.lengths.stride;
  ptx::pdl_wait();

  typename E::Bits b[C::kPer];
  int32_t n;
  uint32_t page_count = 0;
  if (a.simple_room >= 0) {
    // All that the buffer has is asked for at once, before the row's length is known.
    hold<C>(b, window, a.width, Portion<C>(-vector_shift<E>(window)));
    const int32_t length = *length_at;
    const int64_t table_row = a.form == kPaged ? simple_table_row(a, index) : 0;
    if (a.simple_pages <= C::kThreads && table_row >= 0) {
      page_count = static_cast<uint32_t>(a.simple_pages);
      if (tid < a.simple_pages) ptx::copy_async(&shared.pages[tid], a.page_table + table_row * a.table_stride + tid);
    }
    if (tid == 0) s.where = static_cast<uint64_t>(a.form == kRagged ? load_index(a.out_offsets, index, 0) : 0);
    n = simple_length(a, length, table_row);
  } else {
    const Row<E> row(a, index);
    window = row.window;
    n = row.n;
    hold<C>(b, window, n, Portion<C>(-vector_shift<E>(window)));
    if (tid == 0) s.where = row.where;
    if (a.form == kPaged && n > 0) {
      const uint32_t last = page_of(a, static_cast<uint32_t>(n - 1));
      if (last < C::kThreads) {
        page_count = last + 1u;
        if (static_cast<uint32_t>(tid) <= last)
          ptx::copy_async(&shared.pages[tid], reinterpret_cast<const int32_t*>(row.where) + tid);
      }
    }
  }
  if (tid == 0) shared.page_count = page_count;  // not kept: registers are short
  const Portion<C> place(-vector_shift<E>(window));
  if (n <= a.k) {
    ptx::wait_copies();
    short_row<C>(a, 0, 1);
    return;
  }
  if (n + vector_shift<E>(window) > C::kCapacity) {  // _plan.py does not let that happen
    ptx::wait_copies();
    __syncthreads();  // it uses the same memory, which other threads may still be preparing
    exact_path<C>(a);
    return;
  }
  float x[C::kPer];
  cut<C>(x, b, n, place);

  float low, top;
  pilot<C>(x, n, a.k, low, top);
  uint32_t low_key = low == low ? key_of(low) : 0xffffffffu, top_key = key_of(top);
  block_ends<C::kWarps>(s.wa, s.wb, low_key, top_key);
  low = float_of(low_key);
  top = float_of(top_key);
  if (!Bins::fit(low, top)) {
    ptx::wait_copies();
    crowded_held<C>(a, low, top, -1, -1, a.k);
    return;
  }
  const Bins bins(low, top);
  if (C::kShort && tid == 0) s.score = top;
  const uint32_t base = ptx::smem_address(s.hist) - (__float_as_uint(Bins::kBase) << 2);
#pragma unroll
  for (int i = 0; i < C::kPer; ++i) ptx::count(base + (__float_as_uint(bins.of(x[i])) << 2));
  __syncthreads();
  const int32_t ranks[1] = {a.k};
  find_crossings<C>(s, ranks);
  const Found f = s.found[0];
  if (f.count > kTieCap || f.bin == Bins::kRest) {
    ptx::wait_copies();
    crowded_held<C>(a, low, top, f.bin, f.count, a.k - f.above);
    return;
  }
  const float crossing = Bins::number(f.bin);
  Bins same = bins;
  if (C::kShort) same.top = s.score;  // read back: else all bins are kept from the histogram on
#pragma unroll
  for (int i = 0; i < C::kPer; i += 4) {
    bool in[4];
#pragma unroll
    for (int d = 0; d < 4; ++d) in[d] = same.of(x[i + d]) == crossing;
    if (in[0] | in[1] | in[2] | in[3]) {
#pragma unroll
      for (int d = 0; d < 4; ++d)
        ptx::append(in[d], &s.member_count, s.members, __float_as_uint(x[i + d]),
                    static_cast<uint32_t>(place.of(i + d)));
    }
  }
  ptx::wait_copies();
  __syncthreads();
  uint32_t value[C::kVectors];
  bool direct = false;
  const auto prepare = [&]() { direct = results_of<C>(a, place, s.where, shared.pages, shared.page_count, value); };
  if (!C::kShort) prepare();  // while others rank
  rank_members<C>(s, f.count, a.k - f.above, a.largest != 0);
  __syncthreads();
  const Threshold t = threshold_of(s);
  if (t.cut) drop_ties<C>(x, place, t, a.largest != 0);
  if (C::kShort) prepare();
  finish_held<C>(a, index, x, t.score, s, value, direct);
  count_path<C>(a, 0, kFast);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) resident_kernel(const __grid_constant__ Args a) {
  if constexpr (C::kTight && ptx::kFewerBlocks > 0) {  // only sm_90 holds such a row without spilling: never chosen
    ptx::pdl_launch_dependents();
    ptx::pdl_wait();
    exact_path<C>(a);
  } else {
    held_row<C>(a);
  }
}

}  // namespace dsa
