// Words of the Metal language for the strict front end: address spaces and types.
//
// Shares nothing with tests/emulator/include: an error in one set of headers is not in the other.
#pragma once
#pragma clang system_header

#ifdef __OPENCL_CPP_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define half _Float16
#else
// Numbers of no target: nothing converts between them, and a pointer without one is `thread`.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
typedef _Float16 half;
constexpr half operator""h(long double value) { return half(value); }
#endif
typedef __bf16 bfloat;

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef ulong size_t;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

namespace metal {
template <typename T, int N> struct __vec_of {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <typename T, int N> using vec = typename __vec_of<T, N>::type;
}  // namespace metal

#define __VECTORS(T)             \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
__VECTORS(char) __VECTORS(uchar) __VECTORS(short) __VECTORS(ushort)
__VECTORS(int) __VECTORS(uint) __VECTORS(long) __VECTORS(ulong)
__VECTORS(half) __VECTORS(float) __VECTORS(bfloat)
#ifndef __OPENCL_CPP_VERSION__  // which has no vectors of bool
typedef bool bool2 __attribute__((ext_vector_type(2)));
typedef bool bool3 __attribute__((ext_vector_type(3)));
typedef bool bool4 __attribute__((ext_vector_type(4)));
#endif

// `float4(a, b.xy, 1)` is `__make<float4>(a, b.xy, 1)` here: a macro in front of the kernel.
template <typename T> struct __parts_of { static constexpr constant int n = 1; };
template <typename T, int N> struct __parts_of<T __attribute__((ext_vector_type(N)))> {
  static constexpr constant int n = N;
};
template <typename... A> struct __parts { static constexpr constant int n = 0; };
template <typename A, typename... Rest> struct __parts<A, Rest...> {
  static constexpr constant int n = __parts_of<A>::n + __parts<Rest...>::n;
};
template <typename V, typename... A> V __made(A... parts);
template <typename V, typename... A> inline V __make(A... parts) {
  static_assert(__parts<A...>::n == __parts_of<V>::n || (sizeof...(A) < 2 && __parts<A...>::n < 2),
                "a vector from the wrong number of parts");
  return __made<V>(parts...);
}
