// The process around an emulated kernel: reads launches from stdin, runs them, writes the outputs to stdout.
//
// A process of its own, so that the address sanitizer works (it must be first in its process) and a crash of a faulty
// kernel is an answer, not the end of pytest. Every tensor gets its own allocation with the alignment of the original,
// red zones around it and poison in the gaps between its rows. One request:
//
//   launch <entry> <args bytes> <buffers> <seed> <schedule> <preempt> <latency> <resident> <pdl> <max switches>
//   <strict>\n buffer <offset in args, or -1> <rows> <row bytes> <stride bytes> <alignment mod 128> <mode: r, w, k>
//   <keep id>\n   (for each) the args, then the rows of every buffer
//
// mode: r = input, w = output (starts as garbage), k = kept between launches under its id and zero at first
// (workspace). The answer: "ok <switches> <collectives> <barriers> <atomics> <async copies> <spins>\n" and the rows of
// every w and k buffer, or "error <bytes>\n" and a text.
#pragma once

#include <cinttypes>
#include <map>

#include "cuda_cpu.h"

namespace server {

using Entry = void (*)(void* args, size_t bytes);  // calls cpu::launch one or more times through run()
inline std::map<std::string, Entry>& entries() {
  static std::map<std::string, Entry> m;
  return m;
}
struct Register {
  Register(const char* name, Entry e) { entries()[name] = e; }
};
#define EMULATED_ENTRY(name, function) static const server::Register name##_registered(#name, function)

inline std::string failure;

// What a launcher calls: runs one grid unless an earlier grid of the same entry has failed.
template <class F>
void run(const cpu::Launch& l, F body) {
  if (!failure.empty()) return;
  failure = cpu::launch(l, body);
  cpu::st.options.seed = cpu::st.options.seed * 31 + 7;
  cpu::st.options.pdl = false;
}

constexpr size_t kMargin = 256;
constexpr uint8_t kCanary = 0xB5;
constexpr size_t kHuge = size_t{1} << 28;  // beyond this the address space is reserved and only the rows are backed

struct Buffer {
  long arg = -1;
  size_t rows = 0, row_bytes = 0, stride = 0, misalign = 0, span = 0, block = 0;
  char mode = 'r';
  int keep = 0;
  uint8_t* memory = nullptr;  // the allocation
  uint8_t* base = nullptr;
  bool huge = false;
  std::vector<uint8_t> data;  // rows one after another

  uint8_t* row(size_t i) const { return base + i * stride; }

  void allocate() {
    span = rows == 0 || row_bytes == 0 ? 0 : (rows - 1) * stride + row_bytes;
    if (span == 0) return;
    huge = span > kHuge;
    if (huge) {
      block = span + 2 * (1 << 16);
      memory =
          static_cast<uint8_t*>(mmap(nullptr, block, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (memory == MAP_FAILED) std::perror("emulator: reserving address space"), std::exit(3);
      base = memory + (1 << 16) + misalign;
      for (size_t i = 0; i < rows; ++i) {
        const auto from = reinterpret_cast<uintptr_t>(row(i)) & ~uintptr_t{4095};
        const auto to = (reinterpret_cast<uintptr_t>(row(i)) + row_bytes + 4095) & ~uintptr_t{4095};
        mprotect(reinterpret_cast<void*>(from), to - from, PROT_READ | PROT_WRITE);
      }
    } else {
      block = span + kMargin;
      memory = static_cast<uint8_t*>(std::malloc(block));
      uint8_t* first = memory + 32;
      base = first + ((misalign - reinterpret_cast<uintptr_t>(first)) & 127);
      std::memset(memory, kCanary, block);
    }
  }

  void put(const uint8_t* from) const {
    for (size_t i = 0; i < rows && span != 0; ++i) std::memcpy(row(i), from + i * row_bytes, row_bytes);
  }
  void get(uint8_t* to) const {
    for (size_t i = 0; i < rows && span != 0; ++i) std::memcpy(to + i * row_bytes, row(i), row_bytes);
  }
  template <class F>
  void each_gap(F fn) const {
    if (span == 0 || huge) return;
    fn(memory, base);
    if (stride > row_bytes)
      for (size_t i = 0; i + 1 < rows; ++i) fn(row(i) + row_bytes, row(i + 1));
    fn(base + span, memory + block);
  }
  void poison() const {
#if CPU_ASAN
    each_gap([](uint8_t* a, uint8_t* b) { __asan_poison_memory_region(a, static_cast<size_t>(b - a)); });
#endif
  }
  void unpoison() const {
#if CPU_ASAN
    if (memory != nullptr && !huge) __asan_unpoison_memory_region(memory, block);
#endif
  }
  bool gaps_intact() const {
    bool ok = true;
    each_gap([&](uint8_t* a, uint8_t* b) {
      for (; a < b; ++a) ok &= *a == kCanary;
    });
    return ok;
  }
  void release() {
    unpoison();
    if (huge)
      munmap(memory, block);
    else
      std::free(memory);
    memory = base = nullptr;
  }
};

inline FILE* reply;

inline void read_exactly(void* p, size_t n) {
  if (n != 0 && std::fread(p, 1, n, stdin) != n) std::exit(2);
}

inline bool serve_one(std::map<int, Buffer>& kept) {
  char line[512], entry[128];
  if (std::fgets(line, sizeof line, stdin) == nullptr) return false;
  size_t args_bytes, count;
  int pdl;
  cpu::Options o;
  if (std::sscanf(line, "launch %127s %zu %zu %" SCNu64 " %d %d %d %d %d %" SCNu64 " %d", entry, &args_bytes, &count,
                  &o.seed, &o.schedule, &o.preempt, &o.latency, &o.resident, &pdl, &o.max_switches,
                  &o.strict_sites) != 11) {
    std::fprintf(stderr, "emulator: bad request: %s", line);
    std::exit(2);
  }
  o.pdl = pdl != 0;
  std::vector<Buffer> buffers(count);
  for (auto& b : buffers) {
    if (std::fgets(line, sizeof line, stdin) == nullptr ||
        std::sscanf(line, "buffer %ld %zu %zu %zu %zu %c %d", &b.arg, &b.rows, &b.row_bytes, &b.stride, &b.misalign,
                    &b.mode, &b.keep) != 7) {
      std::fprintf(stderr, "emulator: bad buffer: %s", line);
      std::exit(2);
    }
  }
  std::vector<uint8_t> args(args_bytes);
  read_exactly(args.data(), args_bytes);
  for (auto& b : buffers) {
    b.data.resize(b.rows * b.row_bytes);
    if (b.mode == 'r') read_exactly(b.data.data(), b.data.size());
  }
  cpu::Random noise;
  noise.seed(o.seed ^ 0xBADC0FFEE);
  cpu::async.ranges.clear();
  for (auto& b : buffers) {
    if (b.mode == 'k') {
      Buffer& k = kept[b.keep];
      if (k.memory != nullptr && (k.rows != b.rows || k.row_bytes != b.row_bytes)) k.release();
      if (k.memory == nullptr) {
        const long arg = b.arg;
        k = b;
        k.arg = arg;
        k.allocate();
        std::vector<uint8_t> zeros(k.data.size());
        k.put(zeros.data());
      }
      b.memory = nullptr, b.base = k.base, b.span = k.span, b.block = k.block;
      k.poison();
    } else {
      b.allocate();
      std::vector<uint8_t> garbage(b.mode == 'w' || o.pdl ? b.data.size() : 0);
      noise.fill(garbage.data(), garbage.size());
      if (b.span != 0) b.put(garbage.empty() ? b.data.data() : garbage.data());
      b.poison();
    }
    if (b.arg >= 0) std::memcpy(args.data() + b.arg, &b.base, sizeof b.base);
    if (b.span != 0) cpu::async.ranges.push_back({b.base, b.span});
  }
  // Under PDL the inputs become what they are, and the outputs are written over, only when the previous grid completes.
  cpu::async.prior_grid = [&] {
    for (auto& b : buffers) {
      if (b.mode == 'r') b.put(b.data.data());
      if (b.mode == 'w') {
        std::vector<uint8_t> garbage(b.data.size());
        noise.fill(garbage.data(), garbage.size());
        b.put(garbage.data());
      }
    }
  };
  cpu::st.options = o;
  failure.clear();
  auto found = entries().find(entry);
  if (found == entries().end())
    failure = std::string("no entry ") + entry;
  else
    found->second(args.data(), args.size());
  const cpu::Stats s = cpu::st.stats;
  std::vector<uint8_t> now;
  for (size_t i = 0; i < buffers.size(); ++i) {
    Buffer& b = buffers[i];
    if (b.mode == 'k') continue;
    b.unpoison();
    if (!b.gaps_intact() && failure.empty()) failure = "wrote outside of the elements of buffer " + std::to_string(i);
    if (b.mode == 'r' && failure.empty()) {
      now.resize(b.data.size());
      b.get(now.data());
      if (now != b.data) failure = "modified input buffer " + std::to_string(i);
    }
  }
  if (failure.empty()) {
    std::fprintf(reply, "ok %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", s.switches,
                 s.collectives, s.barriers, s.atomics, s.async_copies, s.spins);
    for (auto& b : buffers) {
      if (b.mode == 'r') continue;
      b.get(b.data.data());
      std::fwrite(b.data.data(), 1, b.data.size(), reply);
    }
  } else {
    std::fprintf(reply, "error %zu\n", failure.size());
    std::fwrite(failure.data(), 1, failure.size(), reply);
    for (auto& k : kept) k.second.release();  // what a failed launch leaves in a workspace is nobody's business
    kept.clear();
  }
  std::fflush(reply);
  for (auto& b : buffers)
    if (b.mode != 'k') b.release();
  return true;
}

inline int serve() {
  // kernels may print: their stdout is stderr, the answers have a descriptor of their own
  reply = fdopen(dup(1), "wb");
  dup2(2, 1);
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  std::map<int, Buffer> kept;
  while (serve_one(kept)) {
  }
  return 0;
}

}  // namespace server
