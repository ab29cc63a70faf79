// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, <metal_geometric>.
//
// Metal declares float and half overloads and no bfloat ones (MLX's bf16_math.h adds those), so an
// ambiguous mix such as max(int, uint) stays ambiguous here too. The fast and precise namespaces
// compute the same: the host has one accuracy.
#pragma once
#pragma clang system_header

namespace metal {

// ---- float and half, and vectors of them ---------------------------------------------------------

#define __MSL_LANES1(name)                                                  \
  template <class T, int N> __MSL_INLINE vec<T, N> name(vec<T, N> x) {        \
    vec<T, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = name(T(x[i]));                       \
    return r;                                                               \
  }
#define __MSL_LANES2(name)                                                             \
  template <class T, int N> __MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {      \
    vec<T, N> r;                                                                       \
    for (int i = 0; i < N; i++) r[i] = name(T(x[i]), T(y[i]));                         \
    return r;                                                                          \
  }
#define __MSL_LANES3(name)                                                                          \
  template <class T, int N> __MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y, vec<T, N> z) {      \
    vec<T, N> r;                                                                                    \
    for (int i = 0; i < N; i++) r[i] = name(T(x[i]), T(y[i]), T(z[i]));                             \
    return r;                                                                                       \
  }
#define __MSL_MATH1(name, value)                 \
  __MSL_INLINE float name(float x) { return value; } \
  __MSL_INLINE half name(half h) {                 \
    float x = h;                                 \
    return half(value);                          \
  }                                              \
  __MSL_LANES1(name)
#define __MSL_MATH2(name, value)                          \
  __MSL_INLINE float name(float x, float y) { return value; } \
  __MSL_INLINE half name(half a, half b) {                  \
    float x = a, y = b;                                   \
    return half(value);                                   \
  }                                                       \
  __MSL_LANES2(name)
#define __MSL_MATH3(name, value)                                   \
  __MSL_INLINE float name(float x, float y, float z) { return value; } \
  __MSL_INLINE half name(half a, half b, half c) {                   \
    float x = a, y = b, z = c;                                     \
    return half(value);                                            \
  }                                                                \
  __MSL_LANES3(name)

__MSL_MATH1(acos, __builtin_acosf(x)) __MSL_MATH1(acosh, __builtin_acoshf(x))
__MSL_MATH1(asin, __builtin_asinf(x)) __MSL_MATH1(asinh, __builtin_asinhf(x))
__MSL_MATH1(atan, __builtin_atanf(x)) __MSL_MATH1(atanh, __builtin_atanhf(x))
__MSL_MATH1(ceil, __builtin_ceilf(x)) __MSL_MATH1(cos, __builtin_cosf(x))
__MSL_MATH1(cosh, __builtin_coshf(x)) __MSL_MATH1(cospi, __builtin_cosf(x * M_PI_F))
__MSL_MATH1(exp, __builtin_expf(x)) __MSL_MATH1(exp2, __builtin_exp2f(x))
__MSL_MATH1(exp10, __builtin_powf(10.0f, x)) __MSL_MATH1(fabs, __builtin_fabsf(x))
__MSL_MATH1(floor, __builtin_floorf(x)) __MSL_MATH1(fract, x - __builtin_floorf(x))
__MSL_MATH1(log, __builtin_logf(x)) __MSL_MATH1(log2, __builtin_log2f(x))
__MSL_MATH1(log10, __builtin_log10f(x)) __MSL_MATH1(rint, __builtin_rintf(x))
__MSL_MATH1(round, __builtin_roundf(x)) __MSL_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))
__MSL_MATH1(saturate, x < 0.0f ? 0.0f : (x > 1.0f ? 1.0f : x))
__MSL_MATH1(sign, x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f))
__MSL_MATH1(sin, __builtin_sinf(x)) __MSL_MATH1(sinh, __builtin_sinhf(x))
__MSL_MATH1(sinpi, __builtin_sinf(x * M_PI_F)) __MSL_MATH1(sqrt, __builtin_sqrtf(x))
__MSL_MATH1(tan, __builtin_tanf(x)) __MSL_MATH1(tanh, __builtin_tanhf(x))
__MSL_MATH1(tanpi, __builtin_tanf(x * M_PI_F)) __MSL_MATH1(trunc, __builtin_truncf(x))
__MSL_MATH2(atan2, __builtin_atan2f(x, y)) __MSL_MATH2(copysign, __builtin_copysignf(x, y))
__MSL_MATH2(divide, x / y) __MSL_MATH2(fdim, __builtin_fdimf(x, y))
__MSL_MATH2(fmax, __builtin_fmaxf(x, y)) __MSL_MATH2(fmin, __builtin_fminf(x, y))
__MSL_MATH2(fmod, __builtin_fmodf(x, y)) __MSL_MATH2(pow, __builtin_powf(x, y))
__MSL_MATH2(powr, __builtin_powf(x, y)) __MSL_MATH2(nextafter, __builtin_nextafterf(x, y))
__MSL_MATH3(fma, __builtin_fmaf(x, y, z)) __MSL_MATH3(mix, x + (y - x) * z)
__MSL_MATH3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
__MSL_MATH3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))

// The names that also exist in fast and precise.
#define __MSL_ACCURACIES(M) \
  M(acos) M(acosh) M(asin) M(asinh) M(atan) M(atanh) M(ceil) M(cos) M(cosh) M(cospi) M(exp) \
  M(exp2) M(exp10) M(fabs) M(floor) M(fract) M(log) M(log2) M(log10) M(rint) M(round) \
  M(rsqrt) M(saturate) M(sign) M(sin) M(sinh) M(sinpi) M(sqrt) M(tan) M(tanh) M(tanpi) \
  M(trunc) M(atan2) M(copysign) M(divide) M(fdim) M(fmax) M(fmin) M(fmod) M(pow) M(powr) \
  M(nextafter) M(fma) M(mix) M(fmax3) M(fmin3)

// ---- every scalar type ------------------------------------------------------------------------------

#define __MSL_ORDER(T)                                                            \
  __MSL_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }       \
  __MSL_INLINE T max3(T x, T y, T z) { return max(x, max(y, z)); }                  \
  __MSL_INLINE T min3(T x, T y, T z) { return min(x, min(y, z)); }                  \
  __MSL_INLINE T select(T a, T b, bool c) { return c ? b : a; }
#define __MSL_INTEGER(T)                                    \
  __MSL_INLINE T max(T x, T y) { return x < y ? y : x; }      \
  __MSL_INLINE T min(T x, T y) { return y < x ? y : x; }      \
  __MSL_ORDER(T)
#define __MSL_SIGNED(T) \
  __MSL_INLINE T abs(T x) { return x < 0 ? T(-x) : x; }
#define __MSL_FLOATING(T)                                                       \
  __MSL_INLINE T max(T x, T y) { return fmax(x, y); }                             \
  __MSL_INLINE T min(T x, T y) { return fmin(x, y); }                             \
  __MSL_ORDER(T)                                                                \
  __MSL_INLINE T abs(T x) { return fabs(x); }                                     \
  __MSL_INLINE bool isnan(T x) { return x != x; }                                 \
  __MSL_INLINE bool isinf(T x) { return __builtin_isinf(float(x)); }              \
  __MSL_INLINE bool isfinite(T x) { return __builtin_isfinite(float(x)); }        \
  __MSL_INLINE bool signbit(T x) { return __builtin_signbit(float(x)); }
__MSL_INTEGER(char) __MSL_INTEGER(uchar) __MSL_INTEGER(short) __MSL_INTEGER(ushort)
__MSL_INTEGER(int) __MSL_INTEGER(uint) __MSL_INTEGER(long) __MSL_INTEGER(ulong)
__MSL_SIGNED(char) __MSL_SIGNED(short) __MSL_SIGNED(int) __MSL_SIGNED(long)
__MSL_FLOATING(float) __MSL_FLOATING(half)
__MSL_LANES2(max) __MSL_LANES2(min) __MSL_LANES3(clamp) __MSL_LANES1(abs)
#undef __MSL_ORDER
#undef __MSL_INTEGER
#undef __MSL_SIGNED
#undef __MSL_FLOATING

template <class T, int N> __MSL_INLINE vec<T, N> clamp(vec<T, N> x, T low, T high) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = clamp(T(x[i]), low, high);
  return r;
}
#define __MSL_USING(name) using metal::name;
namespace fast {
__MSL_ACCURACIES(__MSL_USING)
using metal::abs, metal::clamp, metal::max, metal::min;
}
namespace precise {
__MSL_ACCURACIES(__MSL_USING)
using metal::abs, metal::clamp, metal::max, metal::min;
}
#undef __MSL_USING

// ---- vectors --------------------------------------------------------------------------------------------

template <class T, int N> __MSL_INLINE T dot(vec<T, N> x, vec<T, N> y) {
  T sum = T(x[0] * y[0]);
  for (int i = 1; i < N; i++) sum = T(sum + x[i] * y[i]);
  return sum;
}
template <class T, int N> __MSL_INLINE T length_squared(vec<T, N> x) { return dot(x, x); }
template <class T, int N> __MSL_INLINE T length(vec<T, N> x) { return sqrt(dot(x, x)); }
template <int N> __MSL_INLINE bool any(__bools<N> x) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= x[i];
  return r;
}
template <int N> __MSL_INLINE bool all(__bools<N> x) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= x[i];
  return r;
}
template <class T, int N>
__MSL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, __bools<N> c) {
  for (int i = 0; i < N; i++) a[i] = c[i] ? b[i] : a[i];
  return a;
}
template <class T, int N> __MSL_INLINE bool any(vec<T, N> x) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= (x[i] != 0);
  return r;
}
template <class T, int N> __MSL_INLINE bool all(vec<T, N> x) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= (x[i] != 0);
  return r;
}
template <class T, class M, int N>
__MSL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<M, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}

// ---- parts of numbers, bits -----------------------------------------------------------------------------

__MSL_INLINE float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
__MSL_INLINE float frexp(float x, thread int &exponent) {
  int e;
  float r = __builtin_frexpf(x, &e);
  exponent = e;
  return r;
}
__MSL_INLINE float modf(float x, thread float &whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
__MSL_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
__MSL_INLINE ulong popcount(ulong x) { return __builtin_popcountl(x); }
__MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
__MSL_INLINE int clz(int x) { return x ? __builtin_clz(x) : 32; }
__MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
__MSL_INLINE int ctz(int x) { return x ? __builtin_ctz(x) : 32; }
__MSL_INLINE uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
__MSL_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
__MSL_INLINE uint __low_bits(uint n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1u; }
__MSL_INLINE uint extract_bits(uint x, uint offset, uint n) {
  return n == 0 ? 0 : (x >> offset) & __low_bits(n);
}
__MSL_INLINE int extract_bits(int x, uint offset, uint n) {
  return n == 0 ? 0 : int(uint(x) << (32 - n - offset)) >> (32 - n);
}
__MSL_INLINE uint insert_bits(uint base, uint insert, uint offset, uint n) {
  uint mask = n == 0 ? 0 : __low_bits(n) << offset;
  return n == 0 ? base : (base & ~mask) | ((insert << offset) & mask);
}
__MSL_INLINE uint rotate(uint x, uint n) {
  n &= 31;
  return n ? (x << n) | (x >> (32 - n)) : x;
}

// ---- the compiler's own spellings, which MLX's bf16_math.h uses ----------------------------------------

#define __MSL_BUILTIN1(name) \
  __MSL_INLINE float __metal_##name(float x, bool) { return name(x); }
#define __MSL_BUILTIN2(name) \
  __MSL_INLINE float __metal_##name(float x, float y, bool) { return name(x, y); }
__MSL_BUILTIN1(fabs) __MSL_BUILTIN1(acos) __MSL_BUILTIN1(acosh) __MSL_BUILTIN1(asin)
__MSL_BUILTIN1(asinh) __MSL_BUILTIN1(atan) __MSL_BUILTIN1(atanh) __MSL_BUILTIN1(ceil)
__MSL_BUILTIN1(cos) __MSL_BUILTIN1(cosh) __MSL_BUILTIN1(cospi) __MSL_BUILTIN1(exp)
__MSL_BUILTIN1(exp10) __MSL_BUILTIN1(exp2) __MSL_BUILTIN1(floor) __MSL_BUILTIN1(fract)
__MSL_BUILTIN1(log) __MSL_BUILTIN1(log10) __MSL_BUILTIN1(log2) __MSL_BUILTIN1(rint)
__MSL_BUILTIN1(round) __MSL_BUILTIN1(rsqrt) __MSL_BUILTIN1(sin) __MSL_BUILTIN1(sinh)
__MSL_BUILTIN1(sinpi) __MSL_BUILTIN1(sqrt) __MSL_BUILTIN1(tan) __MSL_BUILTIN1(tanh)
__MSL_BUILTIN1(tanpi) __MSL_BUILTIN1(trunc)
__MSL_BUILTIN2(atan2) __MSL_BUILTIN2(divide) __MSL_BUILTIN2(fmax) __MSL_BUILTIN2(fmin)
__MSL_BUILTIN2(fmod) __MSL_BUILTIN2(pow) __MSL_BUILTIN2(powr)
#undef __MSL_BUILTIN1
#undef __MSL_BUILTIN2
__MSL_INLINE float __metal_fma(float x, float y, float z) { return fma(x, y, z); }
__MSL_INLINE float __metal_fmax3(float x, float y, float z, bool) { return fmax3(x, y, z); }
__MSL_INLINE float __metal_fmin3(float x, float y, float z, bool) { return fmin3(x, y, z); }
__MSL_INLINE float __metal_fmedian3(float x, float y, float z, bool) {
  return fmax(fmin(x, y), fmin(fmax(x, y), z));
}
__MSL_INLINE float __metal_nextafter(float x, float y) { return nextafter(x, y); }
__MSL_INLINE float __metal_ldexp(float x, int k, bool) { return ldexp(x, k); }
__MSL_INLINE float __metal_frexp(float x, thread int *e) { return frexp(x, *e); }
__MSL_INLINE float __metal_sinpi(float x) { return sinpi(x); }
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_PRECISE_MATH__ 0
#define __METAL_FAST_MATH__ 0

}  // namespace metal
