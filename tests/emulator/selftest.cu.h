// Small kernels that use each feature of the emulator once, written as the real ones are. Their broken variants are the
// first subjects of the mutant machinery (mutants.py): each must be noticed.
#pragma once

#include "cuda_cpu.h"

namespace selftest {

struct Args {
  const int* in;
  int* out;
  unsigned* workspace;
  int n, rows, threshold, extra;
};

constexpr int kThreads = 128, kWarps = kThreads / 32, kStages = 3, kTile = 64;

// Inclusive scan of one value a thread. `totals` holds a word for each warp.
__device__ __forceinline__ int block_scan(int v, int* totals, int& all) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  for (int o = 1; o < 32; o <<= 1) {
    const int u = __shfl_up_sync(~0u, v, o);
    if (lane >= o) v += u;
  }
  if (lane == 31) totals[warp] = v;
  __syncthreads();
  all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) v += totals[i];
    all += totals[i];
  }
  return v;
}

// Row by row: the positions of all values >= threshold, ascending, then -1.
__global__ void __launch_bounds__(kThreads) compact(const __grid_constant__ Args a) {
  int* totals =
      reinterpret_cast<int*>(cpu::dynamic_smem());  // two sets, used in turn, so one barrier a round is enough
  const int t = static_cast<int>(threadIdx.x);
  const int* in = a.in + static_cast<long long>(blockIdx.x) * a.n;
  int* out = a.out + static_cast<long long>(blockIdx.x) * a.n;
  int base = 0;
  for (int i0 = 0, round = 0; i0 < a.n; i0 += kThreads, ++round) {
    const int i = i0 + t;
    const bool keep = i < a.n && in[i] >= a.threshold;
    int all;
    const int place = block_scan(keep, totals + (round & 1) * kWarps, all);
    if (keep) out[base + place - 1] = i;
    base += all;
  }
  for (int i = base + t; i < a.n; i += kThreads) out[i] = -1;
}

// A cluster for each row: every block counts its part, sums up what the others counted, and writes the row's sum.
__global__ void __launch_bounds__(kThreads) cluster_sum(const __grid_constant__ Args a) {
  auto* part = reinterpret_cast<unsigned*>(cpu::dynamic_smem());
  const unsigned rank = cpu::cluster_rank(), size = cpu::cluster_size(), row = cpu::cluster_id();
  if (threadIdx.x == 0) *part = 0;
  __syncthreads();
  unsigned sum = 0;
  for (unsigned i = rank * kThreads + threadIdx.x; i < static_cast<unsigned>(a.n); i += size * kThreads)
    sum += static_cast<unsigned>(a.in[row * static_cast<unsigned>(a.n) + i]);
  sum = __reduce_add_sync(~0u, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(part, sum);
  cpu::cluster_arrive();
  cpu::cluster_wait();
  unsigned all = 0;
  for (unsigned r = 0; r < size; ++r) all += *cpu::map_shared(part, r);
  cpu::cluster_arrive();  // nobody leaves while another reads
  if (threadIdx.x == 0) a.out[row * size + rank] = static_cast<int>(all);
  cpu::cluster_wait();
}

// Sum of a row that comes through a ring of bulk copies, one producer thread.
__global__ void __launch_bounds__(kThreads) ring(const __grid_constant__ Args a) {
  auto* full = reinterpret_cast<uint64_t*>(cpu::dynamic_smem());
  uint64_t* empty = full + kStages;
  auto* total = reinterpret_cast<int*>(empty + kStages);
  int* tiles = total + 4;
  const int tiles_of_row = a.n / kTile;
  const int* in = a.in + static_cast<long long>(blockIdx.x) * a.n;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      cpu::mbarrier_init(full + s, 1);
      cpu::mbarrier_init(empty + s, kWarps - 1);
    }
    *total = 0;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < tiles_of_row; ++i) {
        const int s = i % kStages;
        if (i >= kStages) cpu::mbarrier_wait(empty + s, static_cast<unsigned>(i / kStages - 1) & 1);
        cpu::mbarrier_arrive_expect_tx(full + s, kTile * 4);
        cpu::bulk_global_to_shared(tiles + s * kTile, in + i * kTile, kTile * 4, full + s);
      }
    }
  } else {
    int sum = 0;
    for (int i = 0; i < tiles_of_row; ++i) {
      const int s = i % kStages;
      while (!cpu::mbarrier_try_wait(full + s, static_cast<unsigned>(i / kStages) & 1)) {
      }
      for (int j = static_cast<int>(threadIdx.x) - 32; j < kTile; j += kThreads - 32) sum += tiles[s * kTile + j];
      __syncwarp();
      if (threadIdx.x % 32 == 0) cpu::mbarrier_arrive(empty + s);
    }
    atomicAdd(total, sum);
    cpu::named_barrier(1, kThreads - 32);
    if (threadIdx.x == 32) a.out[blockIdx.x] = *total;
  }
}

// Each block sends its values to all blocks of its cluster by bulk copies; every block writes all of them.
__global__ void __launch_bounds__(32) exchange(const __grid_constant__ Args a) {
  auto* bar = reinterpret_cast<uint64_t*>(cpu::dynamic_smem());
  int* own = reinterpret_cast<int*>(bar + 2);
  int* all = own + 32;
  const unsigned size = cpu::cluster_size(), rank = cpu::cluster_rank();
  if (threadIdx.x == 0) cpu::mbarrier_init(bar, size);
  cpu::cluster_arrive();
  own[threadIdx.x] = a.in[blockIdx.x * 32 + threadIdx.x];
  __syncwarp();
  cpu::cluster_wait();  // the barriers of all blocks are ready
  if (threadIdx.x < size) {
    uint64_t* theirs = cpu::map_shared(bar, threadIdx.x);
    cpu::mbarrier_arrive_expect_tx(theirs, 128);
    cpu::bulk_shared_to_cluster(cpu::map_shared(all + rank * 32, threadIdx.x), own, 128, theirs);
  }
  cpu::mbarrier_wait(bar, 0);
  cpu::cluster_arrive();
  for (unsigned r = 0; r < size; ++r) a.out[(blockIdx.x * size + r) * 32 + threadIdx.x] = all[r * 32 + threadIdx.x];
  cpu::cluster_wait();  // what this block sent has arrived everywhere
}

// Sum over many blocks through a workspace: parts, and a counter that the last block to arrive sets back to zero.
__global__ void __launch_bounds__(kThreads) last_arriver(const __grid_constant__ Args a) {
  auto* flag = reinterpret_cast<unsigned*>(cpu::dynamic_smem());
  const unsigned parts = static_cast<unsigned>(a.extra), row = blockIdx.x / parts, part = blockIdx.x % parts;
  unsigned* counter = a.workspace + row;
  unsigned* sums = a.workspace + a.rows + row * parts;
  if (threadIdx.x == 0) flag[1] = 0;
  __syncthreads();
  unsigned sum = 0;
  for (unsigned i = part * kThreads + threadIdx.x; i < static_cast<unsigned>(a.n); i += parts * kThreads)
    sum += static_cast<unsigned>(a.in[row * static_cast<unsigned>(a.n) + i]);
  atomicAdd(flag + 1, sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    sums[part] = flag[1];
    __threadfence();
    flag[0] = atomicInc(counter, parts - 1) == parts - 1;
  }
  __syncthreads();
  if (flag[0] != 0 && threadIdx.x == 0) {
    unsigned all = 0;
    for (unsigned p = 0; p < parts; ++p) all += sums[p];
    a.out[row] = static_cast<int>(all);
  }
}

// Stages a tile by cp.async, every thread its own word, reads a neighbour's; starts before its predecessor has ended.
__global__ void __launch_bounds__(kThreads) staged(const __grid_constant__ Args a) {
  int* tile = reinterpret_cast<int*>(cpu::dynamic_smem());
  const int t = static_cast<int>(threadIdx.x);
  cpu::pdl_launch();
  cpu::pdl_wait();
  cpu::cp_async(tile + t, a.in + blockIdx.x * kThreads + t, 4);
  cpu::cp_async_commit();
  cpu::cp_async_wait_group(0);
  __syncthreads();
  a.out[blockIdx.x * kThreads + t] = tile[(t + 1) % kThreads];
}

// Block b waits until block b - 1 has run: right only while both are on the device, which nothing promises.
__global__ void chain(const __grid_constant__ Args a) {
  if (blockIdx.x > 0)
    while (atomicAdd(a.workspace + blockIdx.x - 1, 0) == 0) cpu::backoff();
  a.out[blockIdx.x] = static_cast<int>(blockIdx.x);
  atomicExch(a.workspace + blockIdx.x, 1);
}

// Every intrinsic whose result Python recomputes: lane l of the first warp writes its results in column l.
__global__ void intrinsics(const __grid_constant__ Args a) {
  const int l = static_cast<int>(threadIdx.x);
  const int v = a.in[l];
  int row = 0;
  auto put = [&](auto x) { a.out[row++ * 32 + l] = static_cast<int>(x); };
  put(__shfl_sync(~0u, v, 5));
  put(__shfl_up_sync(~0u, v, 3));
  put(__shfl_down_sync(~0u, v, 7));
  put(__shfl_xor_sync(~0u, v, 9));
  put(__shfl_sync(~0u, v, 1, 8));
  put(__ballot_sync(~0u, v & 1));
  put(__any_sync(~0u, v == a.in[3]));
  put(__all_sync(~0u, v == a.in[3]));
  put(__match_any_sync(~0u, v & 3));
  put(__reduce_add_sync(~0u, v));
  put(__reduce_min_sync(~0u, v));
  put(__reduce_max_sync(~0u, static_cast<unsigned>(v)));
  put(l < 16 ? __ballot_sync(0xFFFFu, v & 2) : __ballot_sync(0xFFFF0000u, v & 4));
  put(static_cast<int>(__shfl_xor_sync(~0u, static_cast<long long>(v) * (1ll << 32), 1) >> 32));
  put(__popc(static_cast<unsigned>(v)));
  put(__ffs(v));
  put(__clz(v));
  put(__brev(static_cast<unsigned>(v)));
  put(__byte_perm(static_cast<unsigned>(v), 0x01020304u, 0x7531));
  put(__funnelshift_l(static_cast<unsigned>(v), 0x80000001u, 5));
  put(__umulhi(static_cast<unsigned>(v), 0xDEADBEEFu));
  put(__float2uint_rz(__int_as_float(v)));
  put(__float2int_rz(__int_as_float(v)));
  put(min(v, 7u));
  put(max(v, -5));
  put(__syncthreads_count(v & 1));
  put(__syncthreads_or(l == 3 && v == 0));
  put(__syncthreads_and(v != 0x7FFFFFF1));
}

// Faults that the scheduler itself must report, chosen by `threshold`.
__global__ void faults(const __grid_constant__ Args a) {
  auto* bar = reinterpret_cast<uint64_t*>(cpu::dynamic_smem());
  const unsigned t = threadIdx.x;
  switch (a.threshold) {
    case 0:
      if (t < 10) __syncwarp();
      break;  // fine: the others have exited
    case 1:
      if (t != 5)
        __ballot_sync(~0u, 1);
      else
        while (*reinterpret_cast<volatile int*>(a.out) != 77) __syncwarp(1u << 5);
      break;
    case 2:
      if (t < 64)
        __syncthreads();
      else
        __syncthreads();
      break;  // one barrier, two places: see the next line
    case 3:
      if (t < 64) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case 4:
      if (t < 32)
        cpu::named_barrier(2, 128);
      else
        __syncthreads();
      break;
    case 5:
      if (t == 0) cpu::mbarrier_init(bar, 2);
      __syncthreads();
      if (t == 0) cpu::mbarrier_arrive(bar);
      cpu::mbarrier_wait(bar, 0);
      break;
    case 6: cpu::mbarrier_wait(bar, 0); break;
    case 7:
      if (t == 0) __shfl_sync(~1u, 1, 0);
      break;
    case 8:
      while (*reinterpret_cast<volatile int*>(a.out) != 0x1234567) cpu::backoff();
      break;
    case 9: cpu::dynamic_smem()[cpu::dynamic_smem_size()] = 1; break;
    case 10: a.out[a.n] = 1; break;
    case 11: const_cast<int*>(a.in)[t] += 1; break;
    case 12:
      if (t == 0) {
        cpu::mbarrier_init(bar, 1);
        cpu::bulk_global_to_shared(bar + 2, a.in, 16, bar);
      }
      break;
    case 13:
      if (t == 0) {
        cpu::mbarrier_init(bar, 1);
        cpu::bulk_global_to_shared(bar + 2, a.in + 1, 16, bar);
      }
      break;
    case 14:
      if (t == 0) a.out[0] = a.in[a.n];
      break;  // a read past the end
    case 15: cpu::cluster_wait(); break;
    case 16: *static_cast<volatile int*>(nullptr) = 1; break;
    default: break;
  }
  if (t == 0) a.out[0] = 4711;
}

inline void launch_all(void* p, unsigned grid, unsigned block, size_t smem, unsigned cluster, void (*kernel)(Args)) {
  const Args a = *static_cast<const Args*>(p);
  cpu::Launch l;
  l.grid = dim3(grid), l.block = dim3(block), l.smem = smem, l.cluster = cluster;
  server::run(l, [=] { kernel(a); });
}

}  // namespace selftest
