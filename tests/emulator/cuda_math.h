// Integer, conversion and floating-point intrinsics of the CUDA emulator, with the device's rules at the edges.
#pragma once

#include "cuda_cpu.h"

// ---- bits

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
inline unsigned __brev(unsigned v) {
  v = ((v >> 1) & 0x55555555u) | ((v & 0x55555555u) << 1);
  v = ((v >> 2) & 0x33333333u) | ((v & 0x33333333u) << 2);
  v = ((v >> 4) & 0x0F0F0F0Fu) | ((v & 0x0F0F0F0Fu) << 4);
  return __builtin_bswap32(v);
}
inline unsigned long long __brevll(unsigned long long v) {
  return (static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32) |
         __brev(static_cast<unsigned>(v >> 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t ab = (static_cast<uint64_t>(b) << 32) | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned sel = s >> (4 * i), byte = static_cast<unsigned>(ab >> (8 * (sel & 7))) & 255;
    r |= ((sel & 8) != 0 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return static_cast<unsigned>((((static_cast<uint64_t>(hi) << 32) | lo) << (s & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return static_cast<unsigned>(((static_cast<uint64_t>(hi) << 32) | lo) >> (s & 31));
}
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) {
  return s >= 32 ? lo : __funnelshift_l(lo, hi, s);
}
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) {
  return s >= 32 ? hi : __funnelshift_r(lo, hi, s);
}

// ---- integer arithmetic

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __mul24(int a, int b) {
  const int64_t x = static_cast<int64_t>(static_cast<int32_t>(static_cast<uint32_t>(a) << 8)) >> 8,
                y = static_cast<int64_t>(static_cast<int32_t>(static_cast<uint32_t>(b) << 8)) >> 8;
  return static_cast<int>(static_cast<uint32_t>(x * y));
}
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFFu) * (b & 0xFFFFFFu); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += ((a >> i) & 255) * ((b >> i) & 255);
  return c;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
inline int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<int16_t>(a) * static_cast<int8_t>(b) +
         static_cast<int16_t>(a >> 16) * static_cast<int8_t>(b >> 8);
}

// libm answers a signalling NaN with NaN, the hardware with the other operand.
namespace cpu {
template <class T>
constexpr T min_number(T a, T b) {
  return a != a ? b : b != b ? a : std::fmin(a, b);
}
template <class T>
constexpr T max_number(T a, T b) {
  return a != a ? b : b != b ? a : std::fmax(a, b);
}
}  // namespace cpu
#define fminf(a, b) cpu::min_number<float>(a, b)
#define fmaxf(a, b) cpu::max_number<float>(a, b)

// min and max of CUDA take any mix of integer types; signed with unsigned of the same size compares as unsigned.
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return cpu::min_number(static_cast<T>(a), static_cast<T>(b));
  else
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return cpu::max_number(static_cast<T>(a), static_cast<T>(b));
  else
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- bits of floats, conversions

inline unsigned __float_as_uint(float f) { return cpu::from_bits<unsigned>(cpu::to_bits(f)); }
inline int __float_as_int(float f) { return cpu::from_bits<int>(cpu::to_bits(f)); }
inline float __uint_as_float(unsigned u) { return cpu::from_bits<float>(u); }
inline float __int_as_float(int i) { return cpu::from_bits<float>(cpu::to_bits(i)); }
inline long long __double_as_longlong(double d) { return cpu::from_bits<long long>(cpu::to_bits(d)); }

namespace cpu {
// Conversions saturate and take NaN to 0; in C++ both are undefined.
template <class T>
T saturate(float rounded) {
  if (!(rounded == rounded)) return 0;
  if (static_cast<double>(rounded) <= static_cast<double>(std::numeric_limits<T>::min()))
    return std::numeric_limits<T>::min();
  if (static_cast<double>(rounded) >= static_cast<double>(std::numeric_limits<T>::max()))
    return std::numeric_limits<T>::max();
  return static_cast<T>(rounded);
}
// An approximate instruction may be off by 2 ulp: so it is, by an amount that depends on the seed and the arguments, as
// two blocks that compute the same value must get the same bits, while nothing may rely on which.
inline float approximate(float v) {
  if (!std::isfinite(v) || v == 0) return v;
  const uint32_t b = __float_as_uint(v);
  const uint64_t h = (b + 0x9E3779B97F4A7C15ull * (st.options.seed + 1)) * 0xD6E8FEB86659FD93ull;
  const float moved = __uint_as_float(b + static_cast<uint32_t>((h >> 40) % 5) - 2u);
  return std::isfinite(moved) ? moved : v;
}
}  // namespace cpu

inline unsigned __float2uint_rz(float f) { return cpu::saturate<unsigned>(std::trunc(f)); }
inline unsigned __float2uint_rn(float f) { return cpu::saturate<unsigned>(std::nearbyint(f)); }
inline unsigned __float2uint_rd(float f) { return cpu::saturate<unsigned>(std::floor(f)); }
inline unsigned __float2uint_ru(float f) { return cpu::saturate<unsigned>(std::ceil(f)); }
inline int __float2int_rz(float f) { return cpu::saturate<int>(std::trunc(f)); }
inline int __float2int_rn(float f) { return cpu::saturate<int>(std::nearbyint(f)); }
inline int __float2int_rd(float f) { return cpu::saturate<int>(std::floor(f)); }
inline int __float2int_ru(float f) { return cpu::saturate<int>(std::ceil(f)); }
inline float __uint2float_rn(unsigned u) { return static_cast<float>(u); }
inline float __int2float_rn(int i) { return static_cast<float>(i); }
inline float __uint2float_rz(unsigned u) {
  float f = static_cast<float>(u);
  return static_cast<double>(f) > static_cast<double>(u) ? std::nextafter(f, 0.0f) : f;
}

// ---- floating point

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __saturatef(float f) { return !(f > 0.0f) ? 0.0f : f > 1.0f ? 1.0f : f; }
inline float rsqrtf(float f) { return cpu::approximate(1.0f / std::sqrt(f)); }
inline float __frsqrt_rn(float f) { return 1.0f / std::sqrt(f); }
inline float __fdividef(float a, float b) {
  if (std::fabs(b) > 0x1p126f && std::fabs(b) < std::numeric_limits<float>::infinity())
    return std::isinf(a) ? std::nanf("") : 0.0f * a * b;
  return cpu::approximate(a / b);
}
namespace cpu {
// sqrt.approx and rcp.approx, for ptx.cuh
inline float sqrt_approx(float f) { return approximate(std::sqrt(f)); }
inline float rcp_approx(float f) { return approximate(1.0f / f); }
}  // namespace cpu

// ---- memory and clock

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldca(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcv(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, cpu::same<T> v) {
  *p = v;
}
template <class T>
void __stcs(T* p, cpu::same<T> v) {
  *p = v;
}
template <class T>
void __stwt(T* p, cpu::same<T> v) {
  *p = v;
}
inline long long clock64() { return static_cast<long long>(cpu::st.stats.switches); }
inline void __trap() { cpu::fail("__trap()"); }
