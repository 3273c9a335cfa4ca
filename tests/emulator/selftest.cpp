// The emulator's process around the self-test kernels.
#include "server.h"
#include "selftest.cu.h"

namespace {
using selftest::Args;
const Args& args(void* p) { return *static_cast<const Args*>(p); }
unsigned rows(void* p) { return static_cast<unsigned>(args(p).rows); }
unsigned extra(void* p) { return static_cast<unsigned>(args(p).extra); }

void compact(void* p, size_t) {
  selftest::launch_all(p, rows(p), selftest::kThreads, 2 * selftest::kWarps * 4, 1, selftest::compact);
}
void cluster_sum(void* p, size_t) {
  selftest::launch_all(p, rows(p) * extra(p), selftest::kThreads, 16, extra(p), selftest::cluster_sum);
}
void ring(void* p, size_t) {
  selftest::launch_all(p, rows(p), selftest::kThreads,
                       2 * selftest::kStages * 8 + 16 + selftest::kStages * selftest::kTile * 4, 1, selftest::ring);
}
void exchange(void* p, size_t) {
  selftest::launch_all(p, rows(p) * extra(p), 32, 16 + 128 + extra(p) * 128, extra(p), selftest::exchange);
}
void last_arriver(void* p, size_t) {
  selftest::launch_all(p, rows(p) * extra(p), selftest::kThreads, 8, 1, selftest::last_arriver);
}
void staged(void* p, size_t) {
  selftest::launch_all(p, rows(p), selftest::kThreads, selftest::kThreads * 4, 1, selftest::staged);
}
void chain(void* p, size_t) { selftest::launch_all(p, rows(p), 32, 0, 1, selftest::chain); }
void intrinsics(void* p, size_t) { selftest::launch_all(p, 1, 32, 0, 1, selftest::intrinsics); }
void faults(void* p, size_t) { selftest::launch_all(p, 1, 128, 64, 1, selftest::faults); }

EMULATED_ENTRY(compact, compact);
EMULATED_ENTRY(cluster_sum, cluster_sum);
EMULATED_ENTRY(ring, ring);
EMULATED_ENTRY(exchange, exchange);
EMULATED_ENTRY(last_arriver, last_arriver);
EMULATED_ENTRY(staged, staged);
EMULATED_ENTRY(chain, chain);
EMULATED_ENTRY(intrinsics, intrinsics);
EMULATED_ENTRY(faults, faults);
}  // namespace

int main() { return server::serve(); }
