// Products by cooperative tensors (Metal 4), which neural accelerators compute. MLX compiles it before a kernel's
// function, after attention.h.

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

// A lane holds four neighbours of two lines of a 16x16 fragment, eight lines apart. Apple leaves the map open; MLX's
// own kernels rely on this one, and a trial compares results before a kernel that uses it is taken. Lanes of one
// line differ in bits 1 and 8, as those of an 8x8 matrix do.
METAL_FUNC int fragment_line(int lane) { return ((lane >> 2) & 4) | ((lane >> 1) & 3); }
METAL_FUNC int fragment_column(int lane) { return (((lane >> 2) & 2) | (lane & 1)) * 4; }

// Four neighbours of the line `at`: of each fragment, its first line's and then its second line's.
template <int N, typename T>
METAL_FUNC void put_quad(thread T (&fragments)[N], int at, vec<T, 4> quad) {
  fragments[at * 4] = quad.x;
  fragments[at * 4 + 1] = quad.y;
  fragments[at * 4 + 2] = quad.z;
  fragments[at * 4 + 3] = quad.w;
}

// sums (16, 32) += left (16, 16) times right: (16, 32), or (32, 16) and transposed.
template <bool IS_TRANSPOSED, typename T>
METAL_FUNC void add_product(
    const thread T (&left)[8], const thread T (&right)[16], thread float (&sums)[16]) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, false, IS_TRANSPOSED, true,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
  typedef decltype(product.template get_left_input_cooperative_tensor<T, T, float>()) Left;
  typedef decltype(product.template get_right_input_cooperative_tensor<T, T, float>()) Right;
  auto a = product.template get_left_input_cooperative_tensor<T, T, float>();
  auto b = product.template get_right_input_cooperative_tensor<T, T, float>();
  auto c = product.template get_destination_cooperative_tensor<Left, Right, float>();
  #pragma clang loop unroll(full)
  for (short i = 0; i < 8; i++) a[i] = left[i];
  #pragma clang loop unroll(full)
  for (short i = 0; i < 16; i++) {
    b[i] = right[i];
    c[i] = sums[i];
  }
  product.run(a, b, c);
  #pragma clang loop unroll(full)
  for (short i = 0; i < 16; i++) sums[i] = c[i];
}
