// One row of the call: its window (contract C1) and where its results go (C2, C5).
#pragma once
#include "args.h"
#include "keys.cuh"

namespace dsa {

__device__ __forceinline__ int64_t load_index(const IndexVector& v, int64_t i, int64_t missing) {
  if (v.data == nullptr) return missing;
  // Both widths without a branch: the low word, and the high word or the sign.
  const int32_t* p = static_cast<const int32_t*>(v.data) + ((i * v.stride) << v.is64);
  const int32_t low = p[0], high = v.is64 ? p[1] : low >> 31;
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
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
    const int64_t width = a.width;
    const int64_t start = clamp64(load_index(a.row_starts, row, 0), 0, width);
    int64_t room = width - start;
    where = 0;
    if (a.form == kPaged) {
      const int64_t batch = load_index(a.row_to_batch, row, row);
      const int64_t first = load_index(a.page_table_starts, row, 0);
      if (batch < 0 || batch >= a.table_rows || first < 0 || first > a.table_width) {
        room = 0;
      } else {
        const int64_t entries = a.table_width - first;  // entries >= room covers the room whatever the page size
        if (entries < room && entries * a.page_size < room) room = entries * a.page_size;
        where = reinterpret_cast<uint64_t>(a.page_table + batch * a.table_stride + first);
      }
    } else if (a.form == kRagged) {
      where = static_cast<uint64_t>(load_index(a.out_offsets, row, 0));
    }
    n = static_cast<int32_t>(clamp64(load_index(a.lengths, row, width), 0, room));
    window = static_cast<const Bits*>(a.scores) + row * a.row_stride + start;
  }
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
    if (a.form != kPaged) return static_cast<int32_t>(p + static_cast<uint32_t>(row.where));
    const uint32_t page = page_of(a, p);
    const uint32_t size = static_cast<uint32_t>(a.page_size);
    const uint32_t physical = static_cast<uint32_t>(reinterpret_cast<const int32_t*>(row.where)[page]);
    return static_cast<int32_t>(physical * size + (p - page * size));
  }

  // `count` positions base + staged[i] to the slots from `slot` on, by one warp. What is common is done without a test
  // a slot.
  __device__ __forceinline__ void put_staged(int32_t slot, uint32_t base, const uint16_t* staged, int32_t count,
                                             int lane) const {
    int32_t* to = out + slot;
    if (positions || scores || a.raw) {
#pragma unroll 1
      for (int32_t i = lane; i < count; i += 32) put(slot + i, base + staged[i]);
    } else if (a.form == kPaged) {
      const uint32_t size = static_cast<uint32_t>(a.page_size);
      const uint32_t* pages = reinterpret_cast<const uint32_t*>(row.where);
      for (int32_t i0 = lane; i0 < count; i0 += 128) {  // four look-ups under way
        uint32_t p[4], page[4], physical[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          p[u] = base + (i0 + u * 32 < count ? staged[i0 + u * 32] : 0u);
          page[u] = page_of(a, p[u]);
          if (i0 + u * 32 < count) physical[u] = pages[page[u]];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          if (i0 + u * 32 < count) to[i0 + u * 32] = static_cast<int32_t>(p[u] + (physical[u] - page[u]) * size);
        }
      }
    } else {
      const uint32_t add = base + static_cast<uint32_t>(row.where);
      int32_t i = lane;
      for (; i + 96 < count; i += 128) {
        const uint32_t p0 = staged[i], p1 = staged[i + 32], p2 = staged[i + 64], p3 = staged[i + 96];
        to[i] = static_cast<int32_t>(add + p0);
        to[i + 32] = static_cast<int32_t>(add + p1);
        to[i + 64] = static_cast<int32_t>(add + p2);
        to[i + 96] = static_cast<int32_t>(add + p3);
      }
#pragma unroll 1
      for (; i < count; i += 32) to[i] = static_cast<int32_t>(add + staged[i]);
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
