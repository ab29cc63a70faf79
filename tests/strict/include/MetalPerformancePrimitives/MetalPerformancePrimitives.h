// An independent declaration of what kernels use of Metal 4's MetalPerformancePrimitives: products of cooperative
// tensors, of which a lane has a 32nd part. With bodies, so that private arrays can become registers.
#pragma once
#pragma clang system_header
#include "../library.h"

namespace metal {
struct execution_simdgroup {};
}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  ulong __shape;
  constexpr matmul2d_descriptor(int m, int n, int k, bool left = false, bool right = false,
                                bool = false, mode = mode::multiply)
      : __shape(ulong(m) | ulong(n) << 16 | ulong(k) << 32 | ulong(left) << 48 | ulong(right) << 49) {}
  constexpr operator ulong() const { return __shape; }
};

float __multiply_add(float, float, float);

template <typename T, int N> struct cooperative_tensor {
  T __elements[N];
  __ALWAYS thread T &operator[](ushort i) { return *(thread T *)&__elements[i]; }
};

template <ulong Descriptor, typename Scope> struct matmul2d {
  static_assert(metal::is_same<Scope, metal::execution_simdgroup>::value, "of a simdgroup only");
  static constexpr constant int __m = int(Descriptor & 0xffff), __n = int(Descriptor >> 16 & 0xffff),
                                __k = int(Descriptor >> 32 & 0xffff);
  static_assert(__m % 16 == 0 && __n % 16 == 0 && __k % 16 == 0, "multiples of 16 only");
  template <typename L, typename R, typename C>
  __ALWAYS cooperative_tensor<L, __m * __k / 32> get_left_input_cooperative_tensor() const {
    return cooperative_tensor<L, __m * __k / 32>();
  }
  template <typename L, typename R, typename C>
  __ALWAYS cooperative_tensor<R, __k * __n / 32> get_right_input_cooperative_tensor() const {
    return cooperative_tensor<R, __k * __n / 32>();
  }
  template <typename L, typename R, typename C>
  __ALWAYS cooperative_tensor<C, __m * __n / 32> get_destination_cooperative_tensor() const {
    return cooperative_tensor<C, __m * __n / 32>();
  }
  template <typename L, typename R, typename C, int NL, int NR, int NC>
  __ALWAYS void run(thread cooperative_tensor<L, NL> &left, thread cooperative_tensor<R, NR> &right,
                    thread cooperative_tensor<C, NC> &out) const {
    static_assert(NL == __m * __k / 32 && NR == __k * __n / 32 && NC == __m * __n / 32, "shapes differ");
    #pragma clang loop unroll(full)
    for (int i = 0; i < NC; i++) {
      out.__elements[i] = C(__multiply_add(float(left.__elements[i % NL]),
                                           float(right.__elements[i % NR]), float(out.__elements[i])));
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp
