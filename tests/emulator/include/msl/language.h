// Words of the language: address spaces, scalar and vector types, constants.
#pragma once
#pragma clang system_header

#ifdef __OPENCL_CPP_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define __MSL_STR const constant char *
#else
#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define constant const __attribute__((opencl_constant))  // what is constant is const
#define thread
#define __MSL_STR const char *
typedef _Float16 half;
#endif

#define __MSL_EMULATOR__ 1
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST static constant constexpr const
// The library's own functions carry no debug information: what is inlined into a kernel then keeps
// the kernel's line, which is the line a fault report needs.
#define __MSL_INLINE __attribute__((always_inline, nodebug)) inline
// Functions of a whole simdgroup: clang must neither move nor duplicate a call of one.
#ifdef __MSL_COUNTED  // ../../counting.py weighs the calls
#define __MSL_CONVERGENT __attribute__((noinline, nodebug, convergent)) inline
#else
#define __MSL_CONVERGENT __attribute__((always_inline, nodebug, convergent)) inline
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned long uintptr_t;
typedef __bf16 bfloat;

#define __MSL_VECTORS(T)                                   \
  typedef T T##2 __attribute__((ext_vector_type(2)));      \
  typedef T T##3 __attribute__((ext_vector_type(3)));      \
  typedef T T##4 __attribute__((ext_vector_type(4)));
__MSL_VECTORS(char) __MSL_VECTORS(uchar) __MSL_VECTORS(short) __MSL_VECTORS(ushort)
__MSL_VECTORS(int) __MSL_VECTORS(uint) __MSL_VECTORS(long) __MSL_VECTORS(ulong)
__MSL_VECTORS(half) __MSL_VECTORS(bfloat) __MSL_VECTORS(float)
#undef __MSL_VECTORS

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.40282346638528859812e+38f
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.40282346638528859812e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HALF_MAX half(65504.0f)
#define INT_MAX 0x7fffffff
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159274f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
#define M_LN10_F 2.30258512f
#define M_LOG10E_F 0.434294492f
#define M_PI_2_F 1.57079637f
#define M_PI_4_F 0.785398185f
#define M_1_PI_F 0.318309873f
#define M_2_SQRTPI_F 1.12837923f
#define M_SQRT2_F 1.41421354f
#define M_SQRT1_2_F 0.707106769f
#define M_E_F 2.71828175f
