// Host side of a launch: attributes of the kernels, workspaces, and the launch itself.
//
// Two units compile it, at the same time: module.cu the kernels for float32, module16.cu those for 16-bit scores.
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

template <class E>
cudaError_t launch_select(const Args& given, int32_t kernel, int32_t cluster, bool by_score, const Device& device,
                          cudaStream_t stream) {
  Args a = given;
  if (by_score) {
    a.raw = 1;
    a.out_positions = nullptr;
    a.out_scores = nullptr;
  }
  // More rows than a workspace has counters fill the device without it.
  if (kernel == kSpread512 && a.rows > kTickets) kernel = kWhole512;
  cudaError_t e = cudaErrorInvalidValue;
  with_kernel<E>(kernel, [&](auto l) {
    using L = decltype(l);
    const LaunchShape shape = L::shape(a, cluster, device.limits);
    if (shape.workspace_bytes) {
      e = workspace_of(device, stream, shape.workspace_bytes, &a.workspace);
      if (e != cudaSuccess) return;
    }
    e = launch<L::kernel, L::kMulti>(a, shape, device, stream);
  });
  if (e != cudaSuccess || !by_score) return e;
  int32_t size = 1;
  while (size < given.k) size <<= 1;
  const LaunchShape shape{kOrderThreads, 1, size * 8, given.rows};
  return launch<order_kernel<OrderConfig<E>>, false>(given, shape, device, stream);
}

extern template cudaError_t launch_select<BFloat16>(const Args&, int32_t, int32_t, bool, const Device&, cudaStream_t);
extern template cudaError_t launch_select<Float16>(const Args&, int32_t, int32_t, bool, const Device&, cudaStream_t);

}  // namespace dsa
