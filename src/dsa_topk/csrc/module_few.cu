// The kernels for a few rows of float32: a unit of its own, so that all compile at the same time.
#define DSA_FEW_ROWS_UNIT
#include "dispatch.h"

namespace dsa {

DSA_FEW_ROWS(, Float32);

}  // namespace dsa
