// The benchmark's floor: a kernel that only reads the windows of a call, as fast as the memory system gives them.
// Not part of the product: built by bench/floor.py into a plain C library.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ __forceinline__ uint4 load_streaming(const uint4* address) {
  uint4 v;
  // Read-only path without an L1 line: each byte is used once, so a line in L1 would only push others out.
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

struct Windows {
  const char* base;    // first byte of row 0
  int64_t row_bytes;   // distance of two rows
  const int* starts;   // first column of each row's window; null: 0
  const int* lengths;  // columns of each row's window
  int element_bytes;   // 2 or 4
  int splits;          // blocks per row
};

__device__ __forceinline__ unsigned folded(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__device__ __forceinline__ unsigned fold_warp(unsigned fold) {
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) fold ^= __shfl_xor_sync(0xffffffffu, fold, distance);
  return fold;
}

// One block reads the part `blockIdx.x % splits` of a row's window and folds all its words into one with XOR: the
// cheapest fold (three inputs an instruction) that keeps every load alive, for any element type. One word per block is
// written, as by a maximum over the part.
template <int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads) read_windows(const Windows w, unsigned* __restrict__ sink) {
  const int row = blockIdx.x / w.splits, part = blockIdx.x % w.splits, thread = threadIdx.x;
  const int64_t bytes = int64_t(w.lengths[row]) * w.element_bytes;
  const char* window = w.base + row * w.row_bytes + (w.starts ? int64_t(w.starts[row]) * w.element_bytes : 0);
  // 16-byte loads need 16-byte addresses: the ragged ends (at most 15 bytes each) are read element by element.
  int64_t head = -reinterpret_cast<intptr_t>(window) & 15;
  if (head > bytes) head = bytes;
  const int vectors = int((bytes - head) / 16);  // fits: a row has less than 2^31 elements
  unsigned fold = 0;
  if (part == 0) {
    auto element = [&](int64_t at) -> unsigned {
      return w.element_bytes == 4 ? *reinterpret_cast<const unsigned*>(window + at)
                                  : *reinterpret_cast<const unsigned short*>(window + at);
    };
    const int64_t at = int64_t(thread) * w.element_bytes, tail = head + int64_t(vectors) * 16 + at;
    if (at < head) fold ^= element(at);
    if (tail < bytes) fold ^= element(tail);
  }
  // Parts are whole 128-byte lines, so that no line is asked for by two blocks.
  const int share = ((vectors + w.splits - 1) / w.splits + 7) & ~7;
  const int end = min(vectors, (part + 1) * share);
  const uint4* body = reinterpret_cast<const uint4*>(window + head);
  int i = part * share + thread;
  for (; i + (kUnroll - 1) * kThreads < end; i += kUnroll * kThreads) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_streaming(body + i + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) fold ^= folded(v[u]);
  }
  uint4 rest[kUnroll] = {};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (i + u * kThreads < end) rest[u] = load_streaming(body + i + u * kThreads);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) fold ^= folded(rest[u]);

  __shared__ unsigned of_warp[kThreads / 32];
  fold = fold_warp(fold);
  if ((thread & 31) == 0) of_warp[thread / 32] = fold;
  __syncthreads();
  if (thread < 32) {
    fold = fold_warp(thread < kThreads / 32 ? of_warp[thread] : 0);
    if (thread == 0) sink[blockIdx.x] = fold;
  }
}

}  // namespace

// Returns a cudaError_t, or -1 when no kernel of that shape is compiled. `sink` has rows * splits words.
extern "C" __attribute__((visibility("default"))) int dsa_floor_read(const void* base, int64_t row_bytes,
                                                                     const int* starts, const int* lengths, int rows,
                                                                     int element_bytes, int splits, int threads,
                                                                     int unroll, unsigned* sink, cudaStream_t stream) {
  const Windows windows{static_cast<const char*>(base), row_bytes, starts, lengths, element_bytes, splits};
#define SHAPE(T, U)                                                     \
  if (threads == T && unroll == U) {                                    \
    read_windows<T, U><<<rows * splits, T, 0, stream>>>(windows, sink); \
    return cudaGetLastError();                                          \
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
