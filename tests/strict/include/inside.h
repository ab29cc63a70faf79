// What MLX's preamble takes from the inside of Metal's library.
#pragma once
#pragma clang system_header
#include "library.h"

#define __METAL_MAYBE_FAST_MATH__ 1
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

#define __ONE(name) float __metal_##name(float, bool);
#define __TWO(name) float __metal_##name(float, float, bool);
#define __THREE(name) float __metal_##name(float, float, float, bool);
__ONE(acos) __ONE(acosh) __ONE(asin) __ONE(asinh) __ONE(atan) __ONE(atanh) __ONE(ceil) __ONE(cos)
__ONE(cosh) __ONE(cospi) __ONE(exp) __ONE(exp10) __ONE(exp2) __ONE(fabs) __ONE(floor) __ONE(fract)
__ONE(log) __ONE(log10) __ONE(log2) __ONE(rint) __ONE(round) __ONE(rsqrt) __ONE(sin) __ONE(sinh)
__ONE(sinpi) __ONE(sqrt) __ONE(tan) __ONE(tanh) __ONE(tanpi) __ONE(trunc)
__TWO(atan2) __TWO(divide) __TWO(fmax) __TWO(fmin) __TWO(fmod) __TWO(pow) __TWO(powr)
__THREE(fmax3) __THREE(fmedian3) __THREE(fmin3)
float __metal_fma(float, float, float);
float __metal_frexp(float, thread int *);
float __metal_ldexp(float, int, bool);
float __metal_nextafter(float, float);

#define __REDUCE(name) float __metal_simd_##name(float);
#define __SHUFFLE(name) ushort __metal_simd_##name(ushort, ushort);
#define __FILL(name) ushort __metal_simd_##name(ushort, ushort, ushort, ushort);
__REDUCE(max) __REDUCE(min) __REDUCE(product) __REDUCE(sum) __REDUCE(xor)
__REDUCE(prefix_exclusive_product) __REDUCE(prefix_exclusive_sum)
__REDUCE(prefix_inclusive_product) __REDUCE(prefix_inclusive_sum)
__SHUFFLE(broadcast) __SHUFFLE(shuffle) __SHUFFLE(shuffle_down) __SHUFFLE(shuffle_up)
__SHUFFLE(shuffle_rotate_down) __SHUFFLE(shuffle_rotate_up) __SHUFFLE(shuffle_xor)
__FILL(shuffle_and_fill_down) __FILL(shuffle_and_fill_up)
ushort __metal_get_simdgroup_size(ushort);
