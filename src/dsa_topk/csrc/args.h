// What a launch gets: one plain struct, shared by the kernels, the binding (module.cu) and the CPU emulator.
// Raw pointers, exact integers, no framework types. Strides count elements.
#pragma once
#include <stdint.h>

namespace dsa {

// A 1-D integer tensor of int32 or int64 with any stride; data == nullptr when the caller gave none.
struct IndexVector {
  const void* data;
  int64_t stride;
  int32_t is64;
  int32_t unused;
};

enum Form : int32_t { kPositions = 0, kRagged = 1, kPaged = 2 };
enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct Args {
  const void* scores;  // [rows, width]
  int64_t row_stride;
  int32_t rows;
  int32_t width;  // N < 2^31
  int32_t k;      // 1 .. 8192
  int32_t form;

  IndexVector lengths, row_starts, out_offsets, row_to_batch, page_table_starts;

  const int32_t* page_table;  // [table_rows, table_width]
  int64_t table_stride, table_rows, table_width;
  int32_t page_size;
  int32_t page_shift;  // p / page_size == (2p * page_magic) >> (32 + page_shift) for every 0 <= p < 2^31
  uint32_t page_magic;
  uint32_t page_near;  // p / page_size == (p * page_near) >> 32 for p < page_near; 0 for pages of one score
  int32_t largest;     // ties: 0 = smallest position first, 1 = largest

  int32_t* out;  // [rows, k]
  int64_t out_stride;
  int32_t* out_positions;  // [rows, k] or nullptr
  int64_t out_positions_stride;
  void* out_scores;  // [rows, k] in the scores' type, or nullptr
  int64_t out_scores_stride;

  // Launch choice (see launch.h)
  int32_t cluster;         // blocks of one row
  uint32_t cluster_magic;  // x / cluster == (x * cluster_magic) >> 32, or one more
  int32_t bitmap_words;    // 32-bit words of a block's bitmap: covers the widest slice a block can get
  int32_t region_cap;      // entries that one block can send to each block of its cluster
  int32_t arena_bytes;     // shared memory behind the fixed part: candidate lists, later the staged positions
  float margin;            // half width of the sampled bracket, in standard deviations
  // Bytes of a slice's head to ask for before it is streamed. Positive: while the sample is drawn, and by the block
  // whose place the row takes if there is one (`ahead`); negative: when the sample has come.
  int32_t prefetch;
  int32_t ahead;        // blocks that run together, if a row is a block: so many rows later its place is taken
  uint32_t* workspace;  // of a spread row (split.cuh), or nullptr
  int32_t raw;          // 1: store positions whatever the form (order.cuh transforms them afterwards)
  // Calls without starts, as decoding makes them: what every row has room for (scores, table), else -1; and the
  // page-table entries of so many scores, 0 where no row has a table.
  int32_t simple_room, simple_pages;
  uint32_t* counters;  // nullptr, or kPaths counters: rows that took each path (tests and profiles)
};

constexpr int32_t kTickets = 4096;  // words of a workspace before its regions: rows of a launch that uses one

enum Path : int32_t { kTrivial = 0, kFast = 1, kSecondTry = 2, kPlateau = 3, kExact = 4, kCounted = 5, kPaths = 6 };

}  // namespace dsa
