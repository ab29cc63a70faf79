// An independent declaration of the part of Metal's library that kernels use. Overload sets are
// those that MLX's texts imply: math on half and float only (bfloat comes from MLX's own preamble),
// min and max on every integer type, nothing mixed.
#pragma once
#pragma clang system_header
#include "language.h"

namespace metal {

// ---- traits and limits

template <typename T, T v> struct integral_constant {
  static constexpr constant T value = v;
};
template <bool B> struct bool_constant : integral_constant<bool, B> {};
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <typename A, typename B> struct is_same : false_type {};
template <typename A> struct is_same<A, A> : true_type {};
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename X, typename Y> struct conditional { typedef X type; };
template <typename X, typename Y> struct conditional<false, X, Y> { typedef Y type; };
template <bool B, typename X, typename Y>
using conditional_t = typename conditional<B, X, Y>::type;
template <typename A, typename B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <typename A, typename B>
static constexpr constant bool is_convertible_v = is_convertible<A, B>::value;
template <typename A, typename B> static constexpr constant bool is_same_v = is_same<A, B>::value;
template <typename T> struct numeric_limits {
  static constexpr T max() { return T(1); }
  static constexpr T min() { return T(0); }
  static constexpr T lowest() { return T(0); }
  static constexpr T infinity() { return T(1); }
  static constexpr T quiet_NaN() { return T(1); }
};

// ---- math

#define __EACH(M, T) M(T) M(T##2) M(T##3) M(T##4)
#define __FLOATS(M) __EACH(M, half) __EACH(M, float)
#define __INTEGERS(M)                                                          \
  __EACH(M, char) __EACH(M, uchar) __EACH(M, short) __EACH(M, ushort)          \
  __EACH(M, int) __EACH(M, uint) __EACH(M, long) __EACH(M, ulong)
#define __MATH(T)                                                                               \
  T exp(T); T exp2(T); T exp10(T); T log(T); T log2(T); T log10(T); T sqrt(T); T rsqrt(T);      \
  T sin(T); T cos(T); T tan(T); T sinh(T); T cosh(T); T tanh(T); T asin(T); T acos(T);          \
  T atan(T); T asinh(T); T acosh(T); T atanh(T); T fabs(T); T floor(T); T ceil(T); T rint(T);   \
  T round(T); T trunc(T); T sign(T); T fract(T); T saturate(T); T pow(T, T); T powr(T, T);      \
  T fmod(T, T); T fmin(T, T); T fmax(T, T); T atan2(T, T); T copysign(T, T); T fma(T, T, T);    \
  T mix(T, T, T); T divide(T, T);
#define __COMPARE(T) T min(T, T); T max(T, T); T clamp(T, T, T); T abs(T);
#define __BITS(T) T ctz(T); T clz(T); T popcount(T); T reverse_bits(T); T extract_bits(T, uint, uint);
__FLOATS(__MATH) __FLOATS(__COMPARE) __INTEGERS(__COMPARE) __INTEGERS(__BITS)
#define __DOT(T) T dot(T##2, T##2); T dot(T##3, T##3); T dot(T##4, T##4);
__DOT(half) __DOT(float)
#define __CLASSIFY(T) bool isnan(T); bool isinf(T); bool isfinite(T); bool signbit(T);
__CLASSIFY(half) __CLASSIFY(float)
template <typename T> T select(T, T, bool);
namespace fast { __EACH(__MATH, float) __EACH(__COMPARE, float) }
namespace precise { __EACH(__MATH, float) __EACH(__COMPARE, float) }

// ---- simdgroups and barriers

#define __SIMD(T)                                                                                \
  T simd_sum(T); T simd_product(T); T simd_max(T); T simd_min(T); T simd_broadcast_first(T);     \
  T simd_shuffle(T, ushort); T simd_shuffle_xor(T, ushort); T simd_shuffle_down(T, ushort);      \
  T simd_shuffle_up(T, ushort); T simd_shuffle_rotate_down(T, ushort);                           \
  T simd_shuffle_rotate_up(T, ushort); T simd_broadcast(T, ushort);                              \
  T simd_shuffle_and_fill_up(T, T, ushort); T simd_shuffle_and_fill_down(T, T, ushort);          \
  T simd_prefix_inclusive_sum(T); T simd_prefix_exclusive_sum(T);                                \
  T simd_prefix_inclusive_product(T); T simd_prefix_exclusive_product(T);                        \
  T quad_sum(T); T quad_shuffle_xor(T, ushort);
__FLOATS(__SIMD)
__EACH(__SIMD, char) __EACH(__SIMD, uchar) __EACH(__SIMD, short) __EACH(__SIMD, ushort)
__EACH(__SIMD, int) __EACH(__SIMD, uint)
bool simd_all(bool);
bool simd_any(bool);
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// ---- simdgroup_matrix: with bodies, so that a private array of matrices can become registers

ushort __lane();
vec<float, 2> __multiply(vec<float, 2>, vec<float, 2>, vec<float, 2>);
#define __ALWAYS inline __attribute__((always_inline))

template <typename T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "8x8 only");
  static_assert(is_same<T, float>::value || is_same<T, half>::value || is_same<T, bfloat>::value,
                "half, bfloat or float");
  vec<T, 2> __elements;
  __ALWAYS simdgroup_matrix() {}
  __ALWAYS explicit simdgroup_matrix(T diagonal) {
    __elements[0] = diagonal;
    __elements[1] = diagonal;
  }
  __ALWAYS thread vec<T, 2> &thread_elements() { return *(thread vec<T, 2> *)&__elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
#define __LOAD_STORE(space)                                                                      \
  template <typename T, int C, int R>                                                            \
  __ALWAYS void simdgroup_load(thread simdgroup_matrix<T, C, R> &m, const space T *p,            \
                               ulong n = 8, ulong2 = ulong2(0), bool transpose = false) {        \
    const ushort lane = __lane();                                                                \
    m.__elements[0] = transpose ? p[lane * n] : p[lane];                                         \
    m.__elements[1] = transpose ? p[lane * n + n] : p[lane + 1];                                 \
  }                                                                                              \
  template <typename T, int C, int R>                                                            \
  __ALWAYS void simdgroup_store(thread simdgroup_matrix<T, C, R> m, space T *p, ulong n = 8,     \
                                ulong2 = ulong2(0), bool = false) {                              \
    const ushort lane = __lane();                                                                \
    p[lane * n] = m.__elements[0];                                                               \
    p[lane * n + 1] = m.__elements[1];                                                           \
  }
__LOAD_STORE(device) __LOAD_STORE(threadgroup)
template <typename D, typename A, typename B, typename C>
__ALWAYS void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8> &d, thread simdgroup_matrix<A, 8, 8> a,
    thread simdgroup_matrix<B, 8, 8> b, thread simdgroup_matrix<C, 8, 8> c) {
  vec<float, 2> x, y, z;
  for (int i = 0; i < 2; i++) {
    x[i] = float(a.__elements[i]);
    y[i] = float(b.__elements[i]);
    z[i] = float(c.__elements[i]);
  }
  x = __multiply(x, y, z);
  d.__elements[0] = D(x[0]);
  d.__elements[1] = D(x[1]);
}
template <typename D, typename A, typename B>
__ALWAYS void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8> &d,
                                 thread simdgroup_matrix<A, 8, 8> a,
                                 thread simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<float, 8, 8>(0.0f));
}

struct os_log {
  constexpr os_log(const constant char *, const constant char *) {}
  template <typename... A> void log_debug(const constant char *, A...) const;
};

}  // namespace metal

template <typename To, typename From> constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, from);
}
