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
  return __umulhi(p << 1, a.page_magic) >> a.page_shift;
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
    return p + (ptx::ld_keep(reinterpret_cast<const uint32_t*>(row.where) + page) - page) *
                   static_cast<uint32_t>(a.page_size);
  }

  // Whether results leave alone: no positions or scores with them.
  __device__ __forceinline__ bool alone() const { return positions == nullptr && scores == nullptr && !a.raw; }
  // What positions are staged with (emit.cuh): results that need no page are staged as they leave.
  __device__ __forceinline__ uint32_t add() const {
    return alone() && a.form == kRagged ? static_cast<uint32_t>(row.where) : 0u;
  }
  // How many words a slot lies behind a 16-byte boundary.
  __device__ __forceinline__ int32_t lead(int32_t slot) const {
    return static_cast<int32_t>(reinterpret_cast<uint64_t>(out + slot) >> 2 & 3u);
  }

  // Staged positions to the slots from `slot` on, by one warp: `held` of them, which lie `lead` words behind `stage`,
  // so that four neighbours on a 16-byte boundary go to one.
  __device__ __forceinline__ void put_staged(int32_t slot, int32_t lead, const uint32_t* stage, int32_t held,
                                             int lane) const {
    slot -= lead;  // of the stage's first word
    const auto* pages = reinterpret_cast<const uint32_t*>(row.where);
    if (alone() && a.form != kPaged) {
      put_fours(slot, lead, stage, held, lane, [](uint32_t p) { return p; });
    } else if (alone() && static_cast<uint32_t>(row.n) <= a.page_near) {
      put_fours(slot, lead, stage, held, lane, [&](uint32_t p) {
        const uint32_t page = __umulhi(p, a.page_near);
        return p + (ptx::ld_keep(pages + page) - page) * static_cast<uint32_t>(a.page_size);
      });
    } else if (alone() && a.page_size == 1) {
      put_fours(slot, lead, stage, held, lane, [&](uint32_t p) { return ptx::ld_keep(pages + p); });
    } else {
#pragma unroll 1
      for (int32_t i = lead + lane; i < lead + held; i += 32) put(slot + i, stage[i]);
    }
  }
  template <class F>
  __device__ __forceinline__ void put_fours(int32_t slot, int32_t lead, const uint32_t* stage, int32_t held, int lane,
                                            F&& result) const {
    int32_t* to = out + slot;
    const int32_t end = lead + held, first = (lead + 3) & ~3, last = end & ~3;
    const uint32_t *from = stage + first + 4 * lane, *behind = stage + last;
    int32_t* four = to + first + 4 * lane;
#pragma unroll 1
    for (; from < behind; from += 128, four += 128) {
      const uint4 p = *reinterpret_cast<const uint4*>(from);
      *reinterpret_cast<uint4*>(four) = uint4{result(p.x), result(p.y), result(p.z), result(p.w)};
    }
    // The less than four in front, and behind.
    const int32_t rest = last > first ? last : first, i = lane < 4 ? lead + lane : rest + lane - 4;
    if (i < (lane < 4 ? (first < end ? first : end) : lane < 8 ? end : 0))
      to[i] = static_cast<int32_t>(result(stage[i]));
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
