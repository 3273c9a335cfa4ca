// Host side of a launch: attributes of the kernels, workspaces, and the launch itself.
//
// Four units compile it, at the same time: module.cu the kernels for float32, but for those of a few rows, which
// module_few.cu has; module_bfloat16.cu and module_float16.cu the others.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>

#include "launch.h"

namespace dsa {

constexpr int kMaxDevices = 64;

struct Device {
  int index = 0;
  bool programmatic = false;  // sm_90 and later
  Limits limits;
};

// Attributes are set once a device and kernel, to what the device allows: whichever thread is first, all set the same.
// The first use may happen inside a stream capture of any mode: loading a kernel is no stream operation, but the driver
// refuses it there unless this thread's capture mode is relaxed for the moment.
template <void (*kKernel)(Args), bool kClusters>
cudaError_t prepare(const Device& device) {
  static std::atomic<bool> done[kMaxDevices];
  if (device.index < kMaxDevices && done[device.index].load(std::memory_order_acquire)) return cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t e = cudaThreadExchangeStreamCaptureMode(&mode);
  if (e != cudaSuccess) return e;
  e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.limits.smem_per_block);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (e == cudaSuccess && kClusters)
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (e == cudaSuccess && device.index < kMaxDevices) done[device.index].store(true, std::memory_order_release);
  return e;
}

// module.cu
cudaError_t workspace_of(const Device& device, cudaStream_t stream, int64_t bytes, uint32_t** workspace);

template <void (*kKernel)(Args), bool kClusters>
cudaError_t launch(const Args& a, const LaunchShape& shape, const Device& device, cudaStream_t stream) {
  const cudaError_t e = prepare<kKernel, kClusters>(device);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (device.programmatic) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kKernel, a);
}

// One kernel of a family (launch.h) on scores of type E.
struct Choice {
  int32_t kernel, cluster;
};
enum Family : int32_t { kManyRows, kFewRows };

template <class E, Family kFamily, class F>
bool with_kernel_of(int32_t kernel, F&& f) {
  if constexpr (kFamily == kManyRows) {
    return with_rows_kernel<E>(kernel, f);
  } else {
    return with_few_kernel<E>(kernel, f);
  }
}

// Launches it; false where the family has no such kernel. `a` is filled for the launch.
template <class E, Family kFamily>
bool launch_kernel(Args& a, const Choice& choice, const Device& device, cudaStream_t stream, cudaError_t* e) {
  return with_kernel_of<E, kFamily>(choice.kernel, [&](auto l) {
    using L = decltype(l);
    const LaunchShape shape = L::shape(a, choice.cluster, device.limits);
    *e = shape.blocks == 0 ? cudaErrorInvalidValue : cudaSuccess;
    if (*e == cudaSuccess && shape.workspace_bytes)
      *e = workspace_of(device, stream, shape.workspace_bytes, &a.workspace);
    if (*e == cudaSuccess) *e = launch<L::kernel, L::kMulti>(a, shape, device, stream);
  });
}

// How many of its clusters, of choice.cluster blocks, the device can run at once; 0: none. False as above.
template <class E, Family kFamily>
bool count_clusters(Args& a, const Choice& choice, const Device& device, int* clusters) {
  *clusters = 0;
  return with_kernel_of<E, kFamily>(choice.kernel, [&](auto l) {
    using L = decltype(l);
    const LaunchShape shape = L::shape(a, choice.cluster, device.limits);
    if (shape.blocks == 0 || shape.smem_bytes > device.limits.smem_per_block) return;
    if (prepare<L::kernel, L::kMulti>(device) != cudaSuccess) return;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(shape.cluster));
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(clusters, L::kernel, &config) != cudaSuccess) {
      cudaGetLastError();  // a size that the device refuses is an answer, not an error to leave behind
      *clusters = 0;
    }
  });
}

template <class E>
cudaError_t launch_select(const Args& given, const Choice& wanted, bool by_score, const Device& device,
                          cudaStream_t stream) {
  Args a = given;
  if (by_score) {
    a.raw = 1;
    a.out_positions = nullptr;
    a.out_scores = nullptr;
  }
  Choice choice = wanted;
  // More rows than a workspace has counters fill the device without it.
  if (choice.kernel == kSpread512 && a.rows > kTickets) choice.kernel = kWhole512;
  cudaError_t e = cudaErrorInvalidValue;
  if (!launch_kernel<E, kManyRows>(a, choice, device, stream, &e)) {
    launch_kernel<E, kFewRows>(a, choice, device, stream, &e);
  }
  if (e != cudaSuccess || !by_score) return e;
  int32_t size = 1;
  while (size < given.k) size <<= 1;
  const LaunchShape shape{kOrderThreads, 1, size * 8, given.rows};
  return launch<order_kernel<OrderConfig<E>>, false>(given, shape, device, stream);
}

// What a unit of its own has, and what others then know of it.
#define DSA_FEW_ROWS(DECLARED, E)                                                                                     \
  DECLARED template bool launch_kernel<E, kFewRows>(Args&, const Choice&, const Device&, cudaStream_t, cudaError_t*); \
  DECLARED template bool count_clusters<E, kFewRows>(Args&, const Choice&, const Device&, int*)
#define DSA_ALL_ROWS(DECLARED, E) \
  DECLARED template cudaError_t launch_select<E>(const Args&, const Choice&, bool, const Device&, cudaStream_t)
#ifndef DSA_FEW_ROWS_UNIT
DSA_FEW_ROWS(extern, Float32);
#endif
#ifndef DSA_BFLOAT16_UNIT
DSA_ALL_ROWS(extern, BFloat16);
#endif
#ifndef DSA_FLOAT16_UNIT
DSA_ALL_ROWS(extern, Float16);
#endif

}  // namespace dsa
