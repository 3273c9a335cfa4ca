// The kernels for float16: a unit of its own, so that all compile at the same time.
#define DSA_FLOAT16_UNIT
#include "dispatch.h"

namespace dsa {

DSA_ALL_ROWS(, Float16);

}  // namespace dsa
