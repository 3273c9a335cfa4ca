// The steps of the rare rows: blurred samples, plateaus, missed brackets, full lists, crowded bins.
//
//   kCloser   looks at the sample closer
//   kPass     a filtered pass of the bracket
//   kChoose   the choice among the candidates of such a pass
//   kRetry    after the first pass: on to kHeavy where the bracket ended beside a heavy value, else to kSecond
//   kHeavy    a plateau pass of the heavy value
//   kAround   a filtered pass of a bracket around a heavy value
//   kSecond   a bracket beside the last one, or inside it
//   kSettle   counting passes that close in on the k-th key
//   kCrowd    choice by radix among the candidates of a pass
//   kExactly  the path that needs no room at all
#pragma once
#include "around.cuh"
#include "closer.cuh"
#include "count.cuh"
#include "exact.cuh"
#include "plateau.cuh"
#include "steps.cuh"

namespace dsa {

constexpr int32_t kCloserPrefetch = 32768;  // bytes

// Moves the bracket to the side where the k-th score must be, above `key` or below it: what is left of it on that side,
// else as much again (a miss is a near miss). False: no floats are left there.
__device__ __forceinline__ bool move_bracket(Bracket& b, float bottom, float top, uint32_t key, bool above) {
  const float width = (b.hi < kHuge ? b.hi : top) - (b.lo > -kHuge ? b.lo : bottom);
  if (above) {
    if (key >= kKeyPlusInf) return false;
    b.lo = float_of(key_above(key));
    if (!(b.hi > b.lo)) b.hi = b.lo + width > b.lo ? b.lo + width : INFINITY;
  } else {
    if (key <= kKeyMinusInf) return false;
    b.hi = float_of(key_below(key));
    if (!(b.lo < b.hi)) b.lo = b.hi - width < b.hi ? b.hi - width : -INFINITY;
  }
  b.set_bins(bottom, top);
  return true;
}

// Narrows a bracket whose candidates did not fit to the part where their counts put the k-th score: `share` of them lie
// above it. Scores are spread smoothly over so small a range, or a heavy value is among them and nothing helps.
__device__ __forceinline__ void narrow_bracket(Bracket& b, float bottom, float top, float share) {
  const float width = b.bin_hi - b.bin_lo, at = b.bin_hi - share * width;
  if (at + 0.2f * width < b.hi) b.hi = at + 0.2f * width;
  if (at - 0.2f * width > b.lo) b.lo = at - 0.2f * width;
  b.set_bins(bottom, top);
}

template <class C>
__device__ __forceinline__ uint32_t closer_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  Bracket b;
  const auto row = at.noted();
  if (threadIdx.x == 0) prefetch_head(row, at.slice(row), kCloserPrefetch);  // the look takes a while
  const SampleRanks rank(C::kThreads * C::kSamples, a.k, row.n, a.margin);
  const Step pass = look_closer<C>(b, rank, sample_place<C>(a), around_fits<C>(row), at.s);
  return ask_pass(at.s, b, kFast, pass);
}

// The step that follows a pass which did not settle the row.
__device__ __forceinline__ Step after_pass(Path path) {
  return path == kFast ? kRetry : path == kSecondTry ? kSettle : kExactly;
}

// One filtered pass of the bracket: finishes the row where it holds, else names the step that does.
template <class C>
__device__ __forceinline__ uint32_t pass_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  auto& s = at.s;
  ptx::row_sync<C::kMulti>();  // what the step before left was written, and read everywhere
  if (threadIdx.x == 0) s.spill_count = 0;
  for (int i = threadIdx.x; i < C::kBins; i += C::kThreads) s.hist[i] = 0;  // the pass before may have counted
  __syncthreads();
  Candidates<C> candidates(a, s, at.arena);
  const auto row = at.noted();
  const Slice slice = at.slice(row);
  const Tester<C> test(s.lo, s.hi);
  const int entries = stream_filter<C, 4>(row, slice, test, at.bitmap, candidates);
  candidates.set_bracket(test.low(), test.high());
  const float top = s.bin_hi, scale = histogram_scale<C::kBins>(s.bin_lo, top);
  const Tally t = tally<C>(a, s, candidates, entries, top, scale, at.rank, at.bitmap, slice.last - slice.first);
  if (!t.holds()) return missed<C>(s, t, after_pass(s.path));
  if (threadIdx.x == 0) s.crowd = Crowd{top, scale, 0, t.need, t.lower};
  return step(kChoose, entries);
}

// The choice among the candidates of a pass that holds; it finds again what it needs, since registers are short.
template <class C>
__device__ __forceinline__ uint32_t choose_step(const Args& args, int entries) {
  const Args& a = ptx::opaque(args);
  const Place<C> at(a);
  auto& s = at.s;
  __syncthreads();  // the step before noted what is read here
  const Crowd& c = s.crowd;
  const float top = c.top, scale = c.scale;
  const int32_t need = c.need;
  Candidates<C> candidates(a, s, at.arena);
  const Tester<C> test(s.lo, s.hi);
  candidates.set_bracket(test.low(), test.high());
  Found crossing{0, 0, 0, 0};
  if (need > 0) crossing = crossing_bin<C>(candidates, entries, top, scale, need);
  if (kMayLack<C> && crossing.bin < 0) return missed_below<C>(s, after_pass(s.path));
  count_path<C>(a, at.rank, s.path);
  if (crossing.count > kTieCap) {
    if (threadIdx.x == 0) {
      s.crowd.bin = crossing.bin;
      s.crowd.need = need - crossing.above;
    }
    return step(kCrowd, entries);
  }
  const auto row = at.noted();
  const Slice slice = at.slice(row);
  Taker<C> take{at.bitmap, slice.first, slice.last, 0};
  if (need > 0) take_best<C>(a, candidates, entries, top, scale, crossing, need - crossing.above, take);
  return ask_emission<C>(s, c.lower, take.lower);
}

template <class C>
__device__ __forceinline__ uint32_t retry_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  __syncthreads();  // the step before noted what is read here
  const uint32_t heavy = at.s.heavy;
  const Miss miss = at.s.miss;
  const bool beside = heavy != 0 && ((miss == kTooHigh && key_of(at.s.lo) == key_above(heavy)) ||
                                     (miss == kTooLow && key_of(at.s.hi) == key_below(heavy)));
  return step(beside ? kHeavy : kSecond);
}

template <class C>
__device__ __forceinline__ uint32_t heavy_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  const auto row = at.noted();
  ptx::row_sync<C::kMulti>();  // what the step before left in shared memory was written, and read everywhere
  // The equal bits take the place of the lists: the same answer in every block.
  if (slice_words(row, at.blocks) * 4 > a.arena_bytes) return step(kExactly);
  const Slice slice = at.slice(row);
  const PlateauResult r = plateau_row<C>(a, row, slice, at.s.heavy, at.rank, at.bitmap,
                                         reinterpret_cast<uint32_t*>(at.arena), at.s.heads, at.s.wa, at.s.wb);
  if (r.verdict != 0) {
    if (threadIdx.x == 0) at.s.miss = r.verdict > 0 ? kHeavyTooLow : kHeavyTooHigh;
    return step(at.s.path == kCounted ? kExactly : kSecond);  // no step leads back: every row ends
  }
  count_path<C>(a, at.rank, at.s.path == kCounted ? kCounted : kPlateau);
  return ask_emission<C>(at.s, r.lower, 0);
}

template <class C>
__device__ __forceinline__ uint32_t second_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  const auto& s = at.s;
  __syncthreads();  // the step before noted what is read here
  const Miss miss = s.miss;
  Bracket b;
  b.lo = s.lo;
  b.hi = s.hi;
  b.set_bins(s.bottom, s.top);
  if (miss == kFullList) {
    narrow_bracket(b, s.bottom, s.top, s.share);
  } else {
    const uint32_t side = miss == kTooLow ? key_of(b.hi) : miss == kTooHigh ? key_of(b.lo) : s.heavy;
    if (!move_bracket(b, s.bottom, s.top, side, miss == kTooLow || miss == kHeavyTooLow)) return step(kSettle);
  }
  __syncthreads();  // everyone has read what is noted anew
  return ask_pass(at.s, b, kSecondTry);
}

// Closes in on the k-th key until it is known, or so few scores are left that they fit the spill list whoever finds
// them: the pass that follows holds.
template <class C>
__device__ __forceinline__ uint32_t settle_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  auto& counts = *reinterpret_cast<KeyCounts*>(at.arena);
  static_assert(sizeof(KeyCounts) <= C::kListBytes, "it takes the place of the lists");
  __syncthreads();  // the step before noted the bracket, which is a first guess
  uint32_t low = clamp_key(key_of(at.s.lo)), high = clamp_key(key_of(at.s.hi));
  bool done;
  do {
    const auto row = at.noted();  // found anew: registers are short
    done = count_keys<C>(a, row, at.slice(row), low, high, counts, at.s.wa, at.s.found);
  } while (!done);
  if (low == high) return ask_plateau(at.s, low, kCounted);
  Bracket b;
  b.lo = float_of(low);
  b.hi = float_of(high == 0x7fffffffu ? 0x7ffffffeu : high);  // no score has the key of -0
  b.set_bins(b.lo, b.hi);
  return ask_pass(at.s, b, kCounted);
}

template <class C>
__device__ __forceinline__ uint32_t crowd_step(const Args& args, int entries) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  __syncthreads();  // the step before noted what is read here
  const Crowd& c = at.s.crowd;
  uint32_t lower;
  {
    const auto row = at.noted();
    const Slice slice = at.slice(row);
    Candidates<C> candidates(a, at.s, at.arena);
    candidates.set_bracket(at.s.lo, at.s.hi);
    Taker<C> take{at.bitmap, slice.first, slice.last, 0};
    take_crowded<C>(a, candidates, entries, c.top, c.scale, c.bin, c.need, take);
    lower = take.lower;
  }
  return ask_emission<C>(at.s, c.lower, lower);
}

template <class C>
__device__ __forceinline__ uint32_t exact_step(const Args& args) {
  const Args& a = ptx::opaque(args);  // else the compiler keeps what all steps need in registers
  const Place<C> at(a);
  count_path<C>(a, at.rank, kExact);
  static_assert(sizeof(ExactShared) <= C::kListBytes, "it takes the place of the lists");
  exact_row<typename C::E, C::kThreads, C::kMulti>(a, at.row(), at.index, *reinterpret_cast<ExactShared*>(at.arena),
                                                   at.rank);
  return step(kDone);
}

// Takes a row's steps from `next` on until it is done, or only its emission is left.
template <class C>
__device__ __forceinline__ uint32_t take_steps(const Args& a, uint32_t next) {
#pragma unroll 1
  while (next != step(kDone) && next != step(kEmit)) {
    switch (static_cast<Step>(next & 15u)) {
      case kCloser: next = closer_step<C>(a); break;
      case kPass: next = pass_step<C>(a); break;
      case kChoose: next = choose_step<C>(a, static_cast<int>(next >> 4)); break;
      case kRetry: next = retry_step<C>(a); break;
      case kHeavy: next = heavy_step<C>(a); break;
      case kAround:
        if constexpr (kHasAround<C>) {
          next = around_step<C>(a);
        } else {
          next = step(kExactly);  // never asked for
        }
        break;
      case kSecond: next = second_step<C>(a); break;
      case kSettle: next = settle_step<C>(a); break;
      case kCrowd: next = crowd_step<C>(a, static_cast<int>(next >> 4)); break;
      default: next = exact_step<C>(a); break;
    }
  }
  return next;
}

}  // namespace dsa
