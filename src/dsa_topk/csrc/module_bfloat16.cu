// The kernels for bfloat16: a unit of its own, so that all compile at the same time.
#define DSA_BFLOAT16_UNIT
#include "dispatch.h"

namespace dsa {

DSA_ALL_ROWS(, BFloat16);

}  // namespace dsa
