// The benchmark's floor: a kernel that only reads the windows of a call, as fast as the memory system gives them.
// Not part of the product: built by bench/floor.py into a plain C library.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ __forceinline__ float4 load_streaming(const float4* address) {
  float4 v;
  // Read-only path without an L1 line: each byte is used once, so a line in L1 would only push others out.
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ float folded(float4 v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

__device__ __forceinline__ float fold_warp(float fold) {
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) fold = fmaxf(fold, __shfl_xor_sync(0xffffffffu, fold, distance));
  return fold;
}

// One block reads the part `blockIdx.x % splits` of a row's window and folds all its words into one, which it writes,
// by a maximum: the least that a selection has to do with a score. (XOR takes half the instructions, which shows where
// one long row keeps a few SMs busy: 5% of 4 us.) Scores of 16 bits are read as the words that hold two; no maximum of
// anything, but every load is alive.
//
// A small read is a chain of dependent instructions, so these count: sizes are 32-bit numbers of elements.
template <class Element, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    read_windows(const Element* __restrict__ base, int64_t row_stride, const int* __restrict__ starts,
                 const int* __restrict__ lengths, int splits, float* __restrict__ sink) {
  constexpr int kSize = sizeof(Element), kVector = 16 / kSize;
  const int row = blockIdx.x / splits, part = blockIdx.x % splits;
  const int thread = threadIdx.x, n = lengths[row];
  const Element* window = base + row * row_stride + (starts ? starts[row] : 0);
  // 16-byte loads need 16-byte addresses: the ragged ends (less than a vector each) are read element by element, by two
  // warps.
  const int misaligned = static_cast<int>(-reinterpret_cast<intptr_t>(window) & 15) / kSize;
  const int head = misaligned < n ? misaligned : n, vectors = (n - head) / kVector;
  float fold = -INFINITY;
  const auto element = [&](int i) { return __uint_as_float(window[i]); };
  if (part == 0) {
    const int tail = head + vectors * kVector + thread - 32;
    if (thread < head) fold = element(thread);
    if (thread >= 32 && tail < n) fold = fmaxf(fold, element(tail));
  }
  // Parts are whole 128-byte lines, so that no line is asked for by two blocks.
  const int share = ((vectors + splits - 1) / splits + 7) & ~7;
  const int begin = static_cast<int>(part) * share, end = min(vectors, begin + share);
  const float4* body = reinterpret_cast<const float4*>(window + head);
  int i = begin + thread;
#pragma unroll 4  // loads of the next turn are under way while the last one's are folded
  for (; i + (kUnroll - 1) * kThreads < end; i += kUnroll * kThreads) {
    float4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_streaming(body + i + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) fold = fmaxf(fold, folded(v[u]));
  }
  float4 rest[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (i + u * kThreads < end) {
      rest[u] = load_streaming(body + i + u * kThreads);
    } else {
      rest[u] = float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) fold = fmaxf(fold, folded(rest[u]));

  __shared__ float of_warp[kThreads / 32];
  fold = fold_warp(fold);
  if ((thread & 31) == 0) of_warp[thread / 32] = fold;
  __syncthreads();
  if (thread < 32) {
    fold = fold_warp(thread < kThreads / 32 ? of_warp[thread] : -INFINITY);
    if (thread == 0) sink[blockIdx.x] = fold;
  }
}

template <class Element>
int launch(const void* base, int64_t row_bytes, const int* starts, const int* lengths, int rows, int splits,
           int threads, int unroll, float* sink, cudaStream_t stream) {
  const auto* first = static_cast<const Element*>(base);
  const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Element));
#define SHAPE(T, U)                                                                                             \
  if (threads == T && unroll == U) {                                                                            \
    read_windows<Element, T, U><<<rows * splits, T, 0, stream>>>(first, stride, starts, lengths, splits, sink); \
    return cudaGetLastError();                                                                                  \
  }
  SHAPE(128, 4);
  SHAPE(256, 4);
  SHAPE(256, 8);
  SHAPE(512, 4);
  SHAPE(512, 8);
  SHAPE(1024, 4);
#undef SHAPE
  return -1;
}

}  // namespace

// `row_bytes`: distance of two rows; `starts`: first column of each row's window (null: 0), `lengths`: its columns;
// `element_bytes`: 2 or 4; `splits`: blocks a row; `sink` has rows * splits words. Returns a cudaError_t, or -1 when no
// kernel of that shape is compiled.
extern "C" __attribute__((visibility("default"))) int dsa_floor_read(const void* base, int64_t row_bytes,
                                                                     const int* starts, const int* lengths, int rows,
                                                                     int element_bytes, int splits, int threads,
                                                                     int unroll, float* sink, cudaStream_t stream) {
  return (element_bytes == 4 ? launch<uint32_t> : launch<uint16_t>)(base, row_bytes, starts, lengths, rows, splits,
                                                                    threads, unroll, sink, stream);
}
