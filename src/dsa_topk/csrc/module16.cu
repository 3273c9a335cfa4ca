// The kernels for bfloat16 and float16: a unit of its own, so that both compile at the same time.
#include "dispatch.h"

namespace dsa {

template cudaError_t launch_select<BFloat16>(const Args&, int32_t, int32_t, bool, const Device&, cudaStream_t);
template cudaError_t launch_select<Float16>(const Args&, int32_t, int32_t, bool, const Device&, cudaStream_t);

}  // namespace dsa
