// <metal_simdgroup_matrix>: 8x8 matrices spread over the 32 lanes of a simdgroup.
#pragma once
#pragma clang system_header

namespace metal {

// Apple's map of lanes to elements, the one MLX's kernels rely on: a lane owns the horizontal
// neighbours (row, column) and (row, column + 1).
__MSL_INLINE constexpr uint __matrix_row(uint lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
__MSL_INLINE constexpr uint __matrix_column(uint lane) {
  return ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
}
__MSL_INLINE constexpr uint __matrix_lane(uint row, uint column) {
  return ((row & 4) << 2) | ((column & 4) << 1) | ((row & 3) << 1) | ((column >> 1) & 1);
}

template <class T, int Cols, int Rows> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix: only 8x8");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>,
                "simdgroup_matrix: float, half or bfloat only");
  vec<T, 2> __e;
  simdgroup_matrix() {}
  explicit simdgroup_matrix(T value) {  // a diagonal matrix, as in Metal
    uint lane = __msl_lane(), row = __matrix_row(lane), column = __matrix_column(lane);
    __e[0] = row == column ? value : T(0);
    __e[1] = row == column + 1 ? value : T(0);
  }
  thread vec<T, 2> &thread_elements() { return *(thread vec<T, 2> *)&__e; }
  const thread vec<T, 2> &thread_elements() const { return *(const thread vec<T, 2> *)&__e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R>
__MSL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.__e[0] = value;
  m.__e[1] = value;
  return m;
}
template <class T, int C, int R>
__MSL_INLINE simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, C, R>(value);
}

// Pointer, stride, origin and transposition must be the same in all 32 lanes.
__MSL_CONVERGENT void __matrix_uniform(ulong pointer, ulong rest) {
  struct Pair { ulong pointer, rest; } mine;
  mine.pointer = pointer;
  mine.rest = rest;
  __slots<Pair> all = __exchange(mine);
  if (all.mask != 0xffffffffu) __msl_fail("simdgroup_matrix operation with inactive lanes");
  if (!all.last) return;
  for (int i = 0; i < 32; i++)
    if (all[i].pointer != pointer || all[i].rest != rest)
      __msl_fail("simdgroup_load/store: pointer or stride differs between lanes");
}

#define __MSL_MATRIX_AT(p) (transpose ? p[(column + i + origin.y) * stride + row + origin.x] \
                                      : p[(row + origin.y) * stride + column + i + origin.x])
#define __MSL_MATRIX(AS)                                                                          \
  template <class T, int C, int R>                                                                \
  __MSL_CONVERGENT void simdgroup_load(thread simdgroup_matrix<T, C, R> &m, const AS T *source,   \
                                       ulong stride = C, ulong2 origin = ulong2{0, 0},            \
                                       bool transpose = false) {                                  \
    __matrix_uniform((ulong)source + origin.x * 8191 + origin.y * 131071,                         \
                     stride * 2 + transpose);                                                     \
    uint lane = __msl_lane(), row = __matrix_row(lane), column = __matrix_column(lane);           \
    for (uint i = 0; i < 2; i++) m.__e[i] = __MSL_MATRIX_AT(source);                              \
  }                                                                                               \
  template <class T, int C, int R>                                                                \
  __MSL_CONVERGENT void simdgroup_store(const thread simdgroup_matrix<T, C, R> &m, AS T *target,  \
                                        ulong stride = C, ulong2 origin = ulong2{0, 0},           \
                                        bool transpose = false) {                                 \
    __matrix_uniform((ulong)target + origin.x * 8191 + origin.y * 131071,                         \
                     stride * 2 + transpose);                                                     \
    uint lane = __msl_lane(), row = __matrix_row(lane), column = __matrix_column(lane);           \
    for (uint i = 0; i < 2; i++) __MSL_MATRIX_AT(target) = m.__e[i];                              \
  }
__MSL_MATRIX(device)
__MSL_MATRIX(threadgroup)
#undef __MSL_MATRIX
#undef __MSL_MATRIX_AT

// Accumulates in float for every element type. Apple does not document what half matrices use:
// compare with a tolerance.
template <class TD, class TA, class TB, class TC>
__MSL_CONVERGENT void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<TD, 8, 8> &d, const thread simdgroup_matrix<TA, 8, 8> &a,
    const thread simdgroup_matrix<TB, 8, 8> &b, const thread simdgroup_matrix<TC, 8, 8> &c) {
  struct Pair { vec<float, 2> a, b; } mine;
  mine.a[0] = a.__e[0];
  mine.a[1] = a.__e[1];
  mine.b[0] = b.__e[0];
  mine.b[1] = b.__e[1];
  __slots<Pair> all = __exchange(mine);
  if (all.mask != 0xffffffffu) __msl_fail("simdgroup_matrix operation with inactive lanes");
  uint lane = __msl_lane(), row = __matrix_row(lane), column = __matrix_column(lane);
  float sum0 = float(c.__e[0]), sum1 = float(c.__e[1]);
  for (uint k = 0; k < 8; k++) {
    float left = all[__matrix_lane(row, k)].a[k & 1];
    vec<float, 2> right = all[__matrix_lane(k, column)].b;
    sum0 += left * right[0];
    sum1 += left * right[1];
  }
  d.__e[0] = TD(sum0);
  d.__e[1] = TD(sum1);
}
template <class TD, class TA, class TB>
__MSL_CONVERGENT void simdgroup_multiply(thread simdgroup_matrix<TD, 8, 8> &d,
                                         const thread simdgroup_matrix<TA, 8, 8> &a,
                                         const thread simdgroup_matrix<TB, 8, 8> &b) {
  simdgroup_matrix<TD, 8, 8> zero(TD(0));
  simdgroup_multiply_accumulate(d, a, b, zero);
}

}  // namespace metal
