// <MetalPerformancePrimitives/MetalPerformancePrimitives.h> of Metal 4: products of matrices that lie in the
// registers of a simdgroup, as cooperative tensors. What MLX's kernels for neural accelerators use of it.
#pragma once
#pragma clang system_header

namespace metal {
struct execution_simdgroup {};
}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode operation;
  constexpr matmul2d_descriptor(int m_, int n_, int k_, bool left = false, bool right = false,
                                bool relaxed = false, mode of = mode::multiply)
      : m(m_), n(n_), k(k_), transpose_left(left), transpose_right(right),
        relaxed_precision(relaxed), operation(of) {}
  // Metal takes the descriptor itself as a template argument, which C++17 does not know.
  constexpr operator ulong() const {
    return ulong(m) | ulong(n) << 10 | ulong(k) << 20 | ulong(transpose_left) << 30 |
           ulong(transpose_right) << 31 | ulong(operation == mode::multiply_accumulate) << 32;
  }
};

// The map of lanes to elements that MLX's kernels rely on (`BaseNAXFrag` in steel/gemm/nax.h): fragments of 16x16, of
// which a lane owns four neighbours of a row, and four of the row that is eight below. Fragments follow one
// another along the longer side.
template <class T, int Rows, int Columns> struct __cooperative_tensor {
  static_assert((Rows == 16 || Columns == 16) && Rows % 16 == 0 && Columns % 16 == 0 &&
                    Rows * Columns <= 512,
                "cooperative tensors: of 16x16, 16x32 or 32x16 only");
  static constexpr constant int __num = Rows * Columns / 32;
  typedef T element;
  T __e[__num];
  thread T &operator[](ushort i) {
    if (i >= __num) __msl_fail("cooperative tensor: a lane has fewer elements");
    return *(thread T *)&__e[i];
  }
  const thread T &operator[](ushort i) const {
    if (i >= __num) __msl_fail("cooperative tensor: a lane has fewer elements");
    return *(const thread T *)&__e[i];
  }
  ushort get_capacity() const { return __num; }
  static constexpr int __element(int row, int column) {
    return (row / 16 + column / 16) * 8 + row % 16 / 8 * 4 + column % 4;
  }
  static constexpr uint __lane(int row, int column) {
    const int r = row % 8, c = column % 16 / 4;
    return uint((c & 1) | (r & 3) << 1 | (c & 2) << 2 | (r & 4) << 2);
  }
};
struct __lane_elements {
  float e[16];
};

// Accumulates in float for every element type; Apple does not document what relaxed precision is: compare with a
// tolerance.
template <ulong Descriptor, class Scope> struct matmul2d {
  static_assert(metal::is_same_v<Scope, metal::execution_simdgroup>,
                "matmul2d: of one simdgroup only");
  static constexpr constant int __m = int(Descriptor & 1023), __n = int(Descriptor >> 10 & 1023),
                                __k = int(Descriptor >> 20 & 1023);
  static constexpr constant bool __left = Descriptor >> 30 & 1, __right = Descriptor >> 31 & 1,
                                 __adds = Descriptor >> 32 & 1;

  template <class L, class R, class C> auto get_left_input_cooperative_tensor() const {
    return __cooperative_tensor<L, __left ? __k : __m, __left ? __m : __k>();
  }
  template <class L, class R, class C> auto get_right_input_cooperative_tensor() const {
    return __cooperative_tensor<R, __right ? __n : __k, __right ? __k : __n>();
  }
  template <class L, class R, class C> auto get_destination_cooperative_tensor() const {
    return __cooperative_tensor<C, __m, __n>();
  }

  template <class L, class R, class C>
  __MSL_CONVERGENT void run(const thread L &left, const thread R &right, thread C &out) const {
    const int lane = int(__msl_lane());
    const int first_row = (lane >> 2 & 4) | (lane >> 1 & 3);
    const int first_column = ((lane >> 2 & 2) | (lane & 1)) * 4;
    typedef typename C::element TC;
    float rows[2][__k];
    __lane_elements mine;
    for (int i = 0; i < L::__num; i++) mine.e[i] = float(left.__e[i]);
    metal::__slots<__lane_elements> all = metal::__exchange(mine);
    if (all.mask != 0xffffffffu) __msl_fail("matmul2d with inactive lanes");
    for (int r = 0; r < 2; r++)
      for (int k = 0; k < __k; k++) {
        const int row = __left ? k : first_row + 8 * r, column = __left ? first_row + 8 * r : k;
        rows[r][k] = all[L::__lane(row, column)].e[L::__element(row, column)];
      }
    for (int i = 0; i < R::__num; i++) mine.e[i] = float(right.__e[i]);
    all = metal::__exchange(mine);
    if (all.mask != 0xffffffffu) __msl_fail("matmul2d with inactive lanes");
    static_assert(__m == 16, "matmul2d: products of 16 rows only");
    for (int i = 0; i < C::__num; i++) {
      const int column = first_column + i / 8 * 16 + i % 4;
      float sum = __adds ? float(out.__e[i]) : 0.0f;
      for (int k = 0; k < __k; k++) {
        const int row = __right ? column : k, at = __right ? k : column;
        sum += rows[i % 8 / 4][k] * all[R::__lane(row, at)].e[R::__element(row, at)];
      }
      out.__e[i] = TC(sum);
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp
