// The functions that Python calls through the TVM-FFI C ABI, and the kernels for many rows of float32 (dispatch.h says
// where the others are).
//
//   select(scores, lengths, row_starts, out_offsets, page_table, row_to_batch, page_table_starts, out, out_positions,
//          out_scores, counters, k, form, page_size, largest, by_score, kernel, cluster, margin, prefetch)
//   probe(device, kernel, cluster, width, k) -> clusters of that size which the device can run at once
//
// Absent tensors are None. Arguments were checked in Python (_checks.py); here only what would be a crash is checked
// again.
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <mutex>
#include <vector>

#include "dispatch.h"

namespace dsa {

// Workspaces, zero when they are made and left zero by each launch: one a stream, and one a stream of each capture, so
// that launches which may run at the same time (streams, graphs, branches of a graph) never share one. They live as
// long as the process: a graph may be replayed at any time. May be called inside a capture of any mode.
cudaError_t workspace_of(const Device& device, cudaStream_t stream, int64_t bytes, uint32_t** workspace) {
  struct Owned {
    int device;
    cudaStream_t stream;
    unsigned long long capture;  // 0: none
    int64_t bytes;
    uint32_t* memory;
  };
  static std::mutex lock;
  static std::vector<Owned>* owned = new std::vector<Owned>();  // never destroyed: the driver may be gone at exit
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &capture);
  if (e != cudaSuccess) return e;
  if (status == cudaStreamCaptureStatusNone) capture = 0;
  const std::lock_guard<std::mutex> guard(lock);
  for (auto o = owned->rbegin(); o != owned->rend(); ++o) {
    if (o->device == device.index && o->stream == stream && o->capture == capture && o->bytes >= bytes) {
      *workspace = o->memory;
      return cudaSuccess;
    }
  }
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  e = cudaThreadExchangeStreamCaptureMode(&mode);
  if (e != cudaSuccess) return e;
  void* memory = nullptr;
  cudaStream_t own = nullptr;
  e = cudaMalloc(&memory, static_cast<size_t>(bytes));
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), own);
  if (e == cudaSuccess) e = cudaStreamSynchronize(own);
  if (own) cudaStreamDestroy(own);
  if (e != cudaSuccess && memory) cudaFree(memory);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (e != cudaSuccess) return e;
  owned->push_back(Owned{device.index, stream, capture, bytes, static_cast<uint32_t*>(memory)});
  *workspace = static_cast<uint32_t*>(memory);
  return cudaSuccess;
}

namespace {

// Facts of a device, asked for once a process and device.
cudaError_t device_facts(int index, Device* device) {
  static std::atomic<bool> known[kMaxDevices];
  static Device devices[kMaxDevices];  // written under the lock, before `known`
  static std::mutex lock;
  if (index < kMaxDevices && known[index].load(std::memory_order_acquire)) {
    *device = devices[index];
    return cudaSuccess;
  }
  int major = 0;
  Device d;
  d.index = index;
  cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  const auto ask = [&](int32_t* fact, cudaDeviceAttr attribute) {
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(fact, attribute, index);
  };
  ask(&d.limits.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(&d.limits.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(&d.limits.sms, cudaDevAttrMultiProcessorCount);
  if (e != cudaSuccess) return e;
  d.programmatic = major >= 9;
  if (index < kMaxDevices) {
    const std::lock_guard<std::mutex> guard(lock);
    devices[index] = d;
    known[index].store(true, std::memory_order_release);
  }
  *device = d;
  return cudaSuccess;
}

// Restores the calling thread's device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error = cudaGetDevice(&previous_);
    if (error == cudaSuccess && previous_ != device) {
      error = cudaSetDevice(device);
      changed_ = error == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  cudaError_t error;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

const DLTensor* tensor_of(const TVMFFIAny& a) {
  if (a.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(a.v_ptr);
  if (a.type_index == kTVMFFITensor) {
    return reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(a.v_obj) + sizeof(TVMFFIObject));
  }
  return nullptr;
}

void* data_of(const DLTensor* t) { return t ? static_cast<char*>(t->data) + t->byte_offset : nullptr; }

int64_t stride_of(const DLTensor* t, int dim) {
  if (t->strides) return t->strides[dim];
  int64_t s = 1;
  for (int i = t->ndim - 1; i > dim; --i) s *= t->shape[i];
  return s;
}

IndexVector index_vector(const DLTensor* t) {
  if (!t) return IndexVector{nullptr, 0, 0, 0};
  // A vector of length 1 (or 0) may come without a data pointer or with any stride; "absent" is told by the argument
  // alone.
  return IndexVector{data_of(t), stride_of(t, 0), t->dtype.bits == 64, 0};
}

int fail(const char* kind, const char* text) {
  TVMFFIErrorSetRaisedFromCStr(kind, text);
  return -1;
}

int fail(cudaError_t e, const char* what) {
  char text[256];
  snprintf(text, sizeof text, "dsa_topk: %s failed: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
  return fail("RuntimeError", text);
}

int select(const TVMFFIAny* v, int32_t n) {
  if (n != 20) return fail("TypeError", "select: expected 20 arguments");
  const DLTensor* t[11];
  for (int i = 0; i < 11; ++i) {
    t[i] = tensor_of(v[i]);
    if (!t[i] && v[i].type_index != kTVMFFINone)
      return fail("TypeError", "select: arguments 0 to 10 are tensors or None");
  }
  for (int i = 11; i < 18; ++i) {
    if (v[i].type_index != kTVMFFIInt && v[i].type_index != kTVMFFIBool)
      return fail("TypeError", "select: arguments 11 to 17 are integers");
  }
  if (v[18].type_index != kTVMFFIFloat || v[19].type_index != kTVMFFIInt)
    return fail("TypeError", "select: margin is a float, prefetch an integer");
  const DLTensor* scores = t[0];
  if (!scores || !t[7]) return fail("TypeError", "select: scores and out are tensors");
  for (const DLTensor* x : t) {
    if (x && (x->device.device_type != kDLCUDA || x->device.device_id != scores->device.device_id)) {
      return fail("ValueError", "select: all tensors lie on one CUDA device");
    }
    if (x && data_of(x) == nullptr) {
      bool empty = false;
      for (int i = 0; i < x->ndim; ++i) empty = empty || x->shape[i] == 0;
      if (!empty) return fail("ValueError", "select: a tensor has no memory");
    }
  }
  const auto dtype = scores->dtype.bits == 32 ? kFloat32 : scores->dtype.code == kDLBfloat ? kBFloat16 : kFloat16;

  Args a = {};
  a.scores = data_of(scores);
  a.rows = static_cast<int32_t>(scores->shape[0]);
  a.width = static_cast<int32_t>(scores->shape[1]);
  a.row_stride = stride_of(scores, 0);
  a.k = static_cast<int32_t>(v[11].v_int64);
  a.form = static_cast<int32_t>(v[12].v_int64);
  a.lengths = index_vector(t[1]);
  a.row_starts = index_vector(t[2]);
  a.out_offsets = index_vector(t[3]);
  if (t[4]) {
    a.page_table = static_cast<const int32_t*>(data_of(t[4]));
    a.table_rows = t[4]->shape[0];
    a.table_width = t[4]->shape[1];
    a.table_stride = stride_of(t[4], 0);
  }
  a.row_to_batch = index_vector(t[5]);
  a.page_table_starts = index_vector(t[6]);
  set_page_size(a, static_cast<int32_t>(v[13].v_int64));
  a.largest = static_cast<int32_t>(v[14].v_int64);
  a.out = static_cast<int32_t*>(data_of(t[7]));
  a.out_stride = stride_of(t[7], 0);
  if (t[8]) {
    a.out_positions = static_cast<int32_t*>(data_of(t[8]));
    a.out_positions_stride = stride_of(t[8], 0);
  }
  if (t[9]) {
    a.out_scores = data_of(t[9]);
    a.out_scores_stride = stride_of(t[9], 0);
  }
  a.counters = static_cast<uint32_t*>(data_of(t[10]));
  a.margin = static_cast<float>(v[18].v_float64);
  a.prefetch = static_cast<int32_t>(v[19].v_int64);
  set_simple(a);
  if (a.rows == 0) return 0;

  const int device = scores->device.device_id;
  DeviceGuard guard(device);
  if (guard.error != cudaSuccess) return fail(guard.error, "selecting the device");
  Device facts;
  cudaError_t e = device_facts(device, &facts);
  if (e != cudaSuccess) return fail(e, "asking for the device's limits");
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  const Choice choice{static_cast<int32_t>(v[16].v_int64), static_cast<int32_t>(v[17].v_int64)};
  e = cudaErrorInvalidValue;
  with_element(
      dtype, [&](auto element) { e = launch_select<decltype(element)>(a, choice, v[15].v_int64 != 0, facts, stream); });
  return e == cudaSuccess ? 0 : fail(e, "the launch");
}

int probe(const TVMFFIAny* v, int32_t n, TVMFFIAny* result) {
  if (n != 5) return fail("TypeError", "probe: expected 5 arguments");
  for (int i = 0; i < 5; ++i) {
    if (v[i].type_index != kTVMFFIInt) return fail("TypeError", "probe: arguments are integers");
  }
  DeviceGuard guard(static_cast<int>(v[0].v_int64));
  if (guard.error != cudaSuccess) return fail(guard.error, "selecting the device");
  Device facts;
  const cudaError_t e = device_facts(static_cast<int>(v[0].v_int64), &facts);
  if (e != cudaSuccess) return fail(e, "asking for the device's limits");
  Args a = {};
  a.rows = 1;
  a.width = static_cast<int32_t>(v[3].v_int64);
  a.k = static_cast<int32_t>(v[4].v_int64);
  const Choice choice{static_cast<int32_t>(v[1].v_int64), static_cast<int32_t>(v[2].v_int64)};
  int clusters = 0;
  if (!count_clusters<Float32, kManyRows>(a, choice, facts, &clusters)) {
    count_clusters<Float32, kFewRows>(a, choice, facts, &clusters);
  }
  result->type_index = kTVMFFIInt;
  result->v_int64 = clusters;
  return 0;
}

}  // namespace
}  // namespace dsa

#define DSA_EXPORT extern "C" __attribute__((visibility("default"))) int

DSA_EXPORT __tvm_ffi_select(void*, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  const int status = dsa::select(args, n);
  if (status == 0) {
    result->type_index = kTVMFFINone;
    result->v_int64 = 0;
  }
  return status;
}

DSA_EXPORT __tvm_ffi_probe(void*, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  return dsa::probe(args, n, result);
}
