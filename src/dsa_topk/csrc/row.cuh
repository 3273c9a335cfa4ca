// One row of the call: its window (contract C1) and where its results go (C2, C5).
#pragma once
#include "args.h"
#include "keys.cuh"

namespace dsa {

// An integer's words as they lie in memory. Whoever needs several asks for all before it looks at one: a wait for each
// would cost a row as many trips to memory.
struct IndexWords {
  int32_t low, high;
};

__device__ __forceinline__ IndexWords ask_index(const IndexVector& v, int64_t i) {
  IndexWords w{0, 0};
  if (v.data != nullptr) {
    const int32_t* p = static_cast<const int32_t*>(v.data) + ((i * v.stride) << v.is64);
    w.low = p[0];
    if (v.is64) w.high = p[1];
  }
  return w;
}

__device__ __forceinline__ int64_t index_of(const IndexVector& v, const IndexWords& w, int64_t missing) {
  if (v.data == nullptr) return missing;
  const int32_t high = v.is64 ? w.high : w.low >> 31;
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(w.low));
}

__device__ __forceinline__ int64_t load_index(const IndexVector& v, int64_t i, int64_t missing) {
  return index_of(v, ask_index(v, i), missing);
}

// The page-table row of a row of a simple call (launch.h, set_simple), which it uses from its first entry on; negative:
// there is none, and the row is empty.
__device__ __forceinline__ int64_t simple_table_row(const Args& a, int64_t row) {
  const int64_t batch = load_index(a.row_to_batch, row, row);
  return batch < a.table_rows ? batch : -1;
}

// The number of candidates of such a row, from its length and its page-table row.
__device__ __forceinline__ int32_t simple_length(const Args& a, int32_t length, int64_t table_row) {
  return length < 0 || table_row < 0 ? 0 : length < a.simple_room ? length : a.simple_room;
}

// The page of the window's position p, counted from the window's first.
__device__ __forceinline__ uint32_t page_of(const Args& a, uint32_t p) {
  return static_cast<uint32_t>((static_cast<uint64_t>(p) * a.page_magic) >> a.page_shift);
}

__device__ __forceinline__ int64_t clamp64(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : x > hi ? hi : x; }

// Lives in registers through the whole kernel, so it holds no more than what takes loads to find.
template <class E>
struct Row {
  using Bits = typename E::Bits;

  const Bits* window;  // first score of the window
  int32_t n;           // candidates
  uint64_t where;      // PAGED: address of the page-table entry of the window's first page; RAGGED: offset; else 0

  // What was found before.
  __device__ __forceinline__ Row(const Bits* window_, int32_t n_, uint64_t where_)
      : window(window_), n(n_), where(where_) {}
  // Integers are taken at their exact 64-bit value, so that nothing wraps on the way to a clamp.
  __device__ __forceinline__ Row(const Args& a, int64_t row) {
    const IndexWords start_words = ask_index(a.row_starts, row), length_words = ask_index(a.lengths, row),
                     offset_words = ask_index(a.out_offsets, row), batch_words = ask_index(a.row_to_batch, row),
                     first_words = ask_index(a.page_table_starts, row);
    const int64_t width = a.width;
    const int64_t start = clamp64(index_of(a.row_starts, start_words, 0), 0, width);
    int64_t room = width - start;
    where = 0;
    if (a.form == kPaged) {
      const int64_t batch = index_of(a.row_to_batch, batch_words, row);
      const int64_t first = index_of(a.page_table_starts, first_words, 0);
      if (batch < 0 || batch >= a.table_rows || first < 0 || first > a.table_width) {
        room = 0;
      } else {
        const int64_t entries = a.table_width - first;  // entries >= room covers the room whatever the page size
        if (entries < room && entries * a.page_size < room) room = entries * a.page_size;
        where = reinterpret_cast<uint64_t>(a.page_table + batch * a.table_stride + first);
      }
    } else if (a.form == kRagged) {
      where = static_cast<uint64_t>(index_of(a.out_offsets, offset_words, 0));
    }
    n = static_cast<int32_t>(clamp64(index_of(a.lengths, length_words, width), 0, room));
    window = static_cast<const Bits*>(a.scores) + row * a.row_stride + start;
  }
};

// Results leave in turns (emit.cuh): selected positions, counted from the turn's first, and (PAGED) what each page of
// the turn adds to them. kTurnWords words of 32 positions are as many as a lane ever has in a turn.
constexpr int32_t kTurnWords = 4, kTurnPages = 128;
constexpr int32_t kLeastNear = 33;  // the least page size of which so many pages always hold a turn

template <int kPositions>
struct Stage {
  static constexpr int32_t kRoom = kPositions;
  uint16_t positions[kPositions];
  int32_t add[kTurnPages];
};

// Where a row's results go.
template <class E>
struct Output {
  using Bits = typename E::Bits;

  const Args& a;
  const Row<E>& row;
  int32_t* out;
  int32_t* positions;  // or nullptr
  Bits* scores;        // or nullptr

  __device__ __forceinline__ Output(const Args& args, const Row<E>& r, int64_t index) : a(args), row(r) {
    out = a.out + index * a.out_stride;
    positions = a.out_positions ? a.out_positions + index * a.out_positions_stride : nullptr;
    scores = a.out_scores ? static_cast<Bits*>(a.out_scores) + index * a.out_scores_stride : nullptr;
  }

  // The stored value of a selected position: low 32 bits of the exact result, by unsigned arithmetic.
  __device__ __forceinline__ int32_t stored(uint32_t p) const {
    if (a.raw) return static_cast<int32_t>(p);
    return static_cast<int32_t>(a.form == kPaged ? paged(p) : p + static_cast<uint32_t>(row.where));
  }
  __device__ __forceinline__ uint32_t paged(uint32_t p) const {
    const uint32_t page = page_of(a, p);
    return p + (reinterpret_cast<const uint32_t*>(row.where)[page] - page) * static_cast<uint32_t>(a.page_size);
  }

  // Asks for the pages of `span` positions from `base` on, which is negative where they begin before the window.
  template <class S>
  __device__ __forceinline__ void ask_pages(S& stage, int32_t base, int32_t span, int lane) const {
    if (a.form != kPaged || a.page_size < kLeastNear) return;
    const int32_t end = base + span < row.n ? base + span : row.n;
    const uint32_t first = first_page(base), last = page_of(a, static_cast<uint32_t>(end - 1));
    const int32_t* pages = reinterpret_cast<const int32_t*>(row.where) + first;
#pragma unroll 1
    for (uint32_t i = lane; first + i <= last; i += 32) ptx::copy_async(&stage.add[i], pages + i);
  }
  // Has them, and makes of each what it adds. Before the other lanes read them the warp must meet.
  template <class S>
  __device__ __forceinline__ void set_pages(S& stage, int32_t base, int32_t span, int lane) const {
    if (a.form != kPaged || a.page_size < kLeastNear) return;
    const int32_t end = base + span < row.n ? base + span : row.n;
    const uint32_t first = first_page(base), last = page_of(a, static_cast<uint32_t>(end - 1));
    ptx::wait_copies();
#pragma unroll 1
    for (uint32_t i = lane; first + i <= last; i += 32) {
      const uint32_t physical = static_cast<uint32_t>(stage.add[i]);
      stage.add[i] = static_cast<int32_t>(static_cast<uint32_t>(base) +
                                          (physical - first - i) * static_cast<uint32_t>(a.page_size));
    }
  }
  __device__ __forceinline__ uint32_t first_page(int32_t base) const {
    return page_of(a, base > 0 ? static_cast<uint32_t>(base) : 0u);
  }

  // The first `count` positions of a turn that begins at `base` to the slots from `slot` on, by one warp. What is
  // common is done without a test a slot.
  template <class S>
  __device__ __forceinline__ void put_staged(int32_t slot, int32_t base, const S& stage, int32_t count,
                                             int lane) const {
    int32_t* to = out + slot;
    const uint16_t* staged = stage.positions;
    const auto write = [&](auto&& result) {
      int32_t i = lane;
      for (; i + 96 < count; i += 128) {
        uint32_t r[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) r[u] = result(staged[i + u * 32]);
#pragma unroll
        for (int u = 0; u < 4; ++u) to[i + u * 32] = static_cast<int32_t>(r[u]);
      }
      uint32_t r[3];
#pragma unroll
      for (int u = 0; u < 3; ++u) {
        r[u] = i + u * 32 < count ? result(staged[i + u * 32]) : 0u;
      }
#pragma unroll
      for (int u = 0; u < 3; ++u) {
        if (i + u * 32 < count) to[i + u * 32] = static_cast<int32_t>(r[u]);
      }
    };
    if (positions || scores || a.raw) {
#pragma unroll 1
      for (int32_t i = lane; i < count; i += 32) put(slot + i, static_cast<uint32_t>(base) + staged[i]);
    } else if (a.form == kPaged && a.page_size < kLeastNear) {
      write([&](uint32_t p) { return paged(static_cast<uint32_t>(base) + p); });
    } else if (a.form == kPaged) {
      // The turn's first position, counted from the start of its page (modulo 2^32).
      const uint32_t before = static_cast<uint32_t>(base) - first_page(base) * static_cast<uint32_t>(a.page_size);
      write([&](uint32_t p) { return p + static_cast<uint32_t>(stage.add[page_of(a, p + before)]); });
    } else {
      const uint32_t add = static_cast<uint32_t>(base) + static_cast<uint32_t>(row.where);
      write([&](uint32_t p) { return p + add; });
    }
  }

  __device__ __forceinline__ void put(int32_t slot, uint32_t p) const {
    out[slot] = stored(p);
    if (positions) positions[slot] = static_cast<int32_t>(p);
    if (scores) scores[slot] = row.window[p];
  }

  __device__ __forceinline__ void pad(int32_t slot) const {
    out[slot] = -1;
    if (positions) positions[slot] = -1;
    if (scores) scores[slot] = E::kMinusInf;
  }

  // Every position is selected (n <= k): 0 .. n - 1 in order, then padding. Reads no score unless they are returned.
  __device__ __forceinline__ void put_all(int32_t first, int32_t step) const {
#pragma unroll 1
    for (int32_t slot = first; slot < a.k; slot += step) {
      if (slot < row.n) {
        put(slot, static_cast<uint32_t>(slot));
      } else {
        pad(slot);
      }
    }
  }
};

}  // namespace dsa
