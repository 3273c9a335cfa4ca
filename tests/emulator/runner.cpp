// The emulator's process around the kernels of src/dsa_topk/csrc. Built with -DEMULATED_SMALL it has two element types
// and few kernels, as mutants compile it again and again: 1 = filter kernels, 2 = decode kernels, 3 = both.
#include "server.h"

#include <launch.h>

namespace {

// Behind Args in the request (args.py packs it).
struct Choice {
  int32_t kernel, dtype, cluster, by_score;
};

template <class L>
void select(dsa::Args a, const Choice& choice) {
  dsa::Limits limits;
  limits.sms = 1;  // so that a handful of rows are more than run together
  const dsa::LaunchShape shape = L::shape(a, choice.cluster, limits);
  cpu::Launch l;
  l.grid = dim3(static_cast<unsigned>(shape.blocks)), l.block = dim3(static_cast<unsigned>(shape.threads));
  l.smem = static_cast<size_t>(shape.smem_bytes), l.cluster = static_cast<unsigned>(shape.cluster);
  server::run(l, [=] { L::kernel(a); });
}

template <class E>
void topk_of(const dsa::Args& given, const Choice& choice) {
  dsa::Args a = given;
  if (choice.by_score != 0) {
    a.raw = 1;
    a.out_positions = nullptr;
    a.out_scores = nullptr;
  }
  bool known = true;
#ifdef EMULATED_SMALL
  known = false;
  const auto run = [&](int32_t kernel, auto l) {
    if (choice.kernel == kernel) select<decltype(l)>(a, choice), known = true;
  };
#if EMULATED_SMALL & 1
  run(dsa::kRow128, dsa::FilterLaunch<dsa::Row128<E>>{});
  run(dsa::kCluster512, dsa::BySize<E, dsa::FilterLaunch<dsa::Cluster512<E>>, dsa::SplitLaunch<dsa::Split512<E>>>{});
#endif
#if EMULATED_SMALL & 2
  run(dsa::kHeld8K, dsa::ResidentLaunch<dsa::Held8K<E>>{});
  run(dsa::kSplit512, dsa::SplitLaunch<dsa::Split512<E>>{});
  if constexpr (sizeof(typename E::Bits) == 4) run(dsa::kHeld32K, dsa::ResidentLaunch<dsa::Held32K<E>>{});
#endif
#else
  known = dsa::with_kernel<E>(choice.kernel, [&](auto l) { select<decltype(l)>(a, choice); });
#endif
  if (!known) server::failure = "no kernel " + std::to_string(choice.kernel);
  if (choice.by_score != 0) {
    a = given;
    cpu::Launch l;
    int32_t size = 1;
    while (size < a.k) size <<= 1;
    l.grid = dim3(static_cast<unsigned>(a.rows)), l.block = dim3(dsa::kOrderThreads),
    l.smem = static_cast<size_t>(size) * 8;
    server::run(l, [=] { dsa::order_kernel<dsa::OrderConfig<E>>(a); });
  }
}

void topk(void* p, size_t bytes) {
  if (bytes != sizeof(dsa::Args) + sizeof(Choice)) {
    server::failure = "the request has " + std::to_string(bytes) + " bytes of args, sizeof(Args) is " +
                      std::to_string(sizeof(dsa::Args));
    return;
  }
  dsa::Args a = *static_cast<const dsa::Args*>(p);
  const Choice choice = *reinterpret_cast<const Choice*>(static_cast<const uint8_t*>(p) + sizeof(dsa::Args));
  if (a.rows == 0) return;
  dsa::set_page_size(a, a.page_size);
  dsa::set_simple(a);
#ifdef EMULATED_SMALL
  if (choice.dtype == dsa::kFloat32)
    topk_of<dsa::Float32>(a, choice);
  else if (choice.dtype == dsa::kFloat16)
    topk_of<dsa::Float16>(a, choice);
  else
    server::failure = "the small build has no element type " + std::to_string(choice.dtype);
#else
  dsa::with_element(choice.dtype, [&](auto e) { topk_of<decltype(e)>(a, choice); });
#endif
}

EMULATED_ENTRY(topk, topk);

}  // namespace

int main() { return server::serve(); }
