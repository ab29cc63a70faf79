// Barriers, <metal_simdgroup> and <metal_quadgroup>.
#pragma once
#pragma clang system_header

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
__MSL_CONVERGENT void threadgroup_barrier(mem_flags f) { __msl_tg_barrier(uint(f)); }
__MSL_CONVERGENT void simdgroup_barrier(mem_flags f) { __msl_sg_barrier(uint(f)); }

// ---- one rendezvous of the simdgroup ----------------------------------------------------------

// What the lanes of a simdgroup published, 64 bytes apart (SLOT_SIZE in mslrt.h).
template <class T> struct __slots {
  const thread T *p;
  uint mask;
  int last;
  const thread T &operator[](uint i) const {
    return *(const thread T *)((const thread char *)p + 64 * i);
  }
};
template <class T> __MSL_CONVERGENT __slots<T> __exchange(T v) {
  static_assert(sizeof(T) <= 64, "simd value too large");
  __slots<T> s;
  s.mask = 0;
  s.last = 0;
  s.p = (const thread T *)__msl_simd((const thread void *)&v, sizeof(T), &s.mask, &s.last);
  return s;
}

// One lane reduces for all, into the slot after the last lane's.
template <class T, class F> __MSL_CONVERGENT T __reduce(T v, F f) {
  __slots<T> s = __exchange(v);
  thread T *result = (thread T *)((const thread char *)s.p + 64 * 32);
  if (!s.last) return *result;
  T t[32];
  if (s.mask == 0xffffffffu) {
    for (int i = 0; i < 32; i++) t[i] = s[i];
    for (int w = 16; w > 0; w >>= 1)
      for (int i = 0; i < w; i++) t[i] = f(t[i], t[i + w]);
    *result = t[0];
  } else {
    bool first = true;
    T sum{};
    for (int i = 0; i < 32; i++) {
      if (!(s.mask >> i & 1)) continue;
      sum = first ? T(s[i]) : f(sum, s[i]);
      first = false;
    }
    *result = sum;
  }
  return *result;
}

template <class T, class F> __MSL_CONVERGENT T __scan(T v, T start, bool inclusive, F f) {
  __slots<T> s = __exchange(v);
  uint lanes = __msl_lane() + inclusive;
  T r = start;
  for (uint i = 0; i < lanes; i++)
    if (s.mask >> i & 1) r = f(r, s[i]);
  return r;
}

// The value of lane `i`, which must take part.
template <class T> __MSL_CONVERGENT T __shuffle(T v, uint i) {
  __slots<T> s = __exchange(v);
  if (i > 31 || !(s.mask >> i & 1))
    __msl_fail("simd shuffle/broadcast reads an inactive or out-of-range lane");
  return s[i];
}

// ---- reductions and scans -----------------------------------------------------------------------

#define __MSL_REDUCE(T)                                                                            \
  __MSL_CONVERGENT T simd_sum(T v) { return __reduce(v, [](T a, T b) { return T(a + b); }); }      \
  __MSL_CONVERGENT T simd_product(T v) { return __reduce(v, [](T a, T b) { return T(a * b); }); }  \
  __MSL_CONVERGENT T simd_max(T v) { return __reduce(v, [](T a, T b) { return max(a, b); }); }     \
  __MSL_CONVERGENT T simd_min(T v) { return __reduce(v, [](T a, T b) { return min(a, b); }); }     \
  __MSL_CONVERGENT T simd_prefix_inclusive_sum(T v) {                                              \
    return __scan(v, T(0), true, [](T a, T b) { return T(a + b); });                               \
  }                                                                                                \
  __MSL_CONVERGENT T simd_prefix_exclusive_sum(T v) {                                              \
    return __scan(v, T(0), false, [](T a, T b) { return T(a + b); });                              \
  }                                                                                                \
  __MSL_CONVERGENT T simd_prefix_inclusive_product(T v) {                                          \
    return __scan(v, T(1), true, [](T a, T b) { return T(a * b); });                               \
  }                                                                                                \
  __MSL_CONVERGENT T simd_prefix_exclusive_product(T v) {                                          \
    return __scan(v, T(1), false, [](T a, T b) { return T(a * b); });                              \
  }                                                                                                \
  __MSL_CONVERGENT T quad_sum(T v) {                                                               \
    __slots<T> s = __exchange(v);                                                                  \
    uint q = __msl_lane() & ~3u;                                                                   \
    return T(T(s[q] + s[q + 1]) + T(s[q + 2] + s[q + 3]));                                         \
  }                                                                                                \
  __MSL_CONVERGENT T quad_max(T v) {                                                               \
    __slots<T> s = __exchange(v);                                                                  \
    uint q = __msl_lane() & ~3u;                                                                   \
    return max(max(T(s[q]), T(s[q + 1])), max(T(s[q + 2]), T(s[q + 3])));                          \
  }                                                                                                \
  __MSL_CONVERGENT T quad_min(T v) {                                                               \
    __slots<T> s = __exchange(v);                                                                  \
    uint q = __msl_lane() & ~3u;                                                                   \
    return min(min(T(s[q]), T(s[q + 1])), min(T(s[q + 2]), T(s[q + 3])));                          \
  }
#define __MSL_REDUCE_BITS(T)                                                                       \
  __MSL_CONVERGENT T simd_and(T v) { return __reduce(v, [](T a, T b) { return T(a & b); }); }      \
  __MSL_CONVERGENT T simd_or(T v) { return __reduce(v, [](T a, T b) { return T(a | b); }); }       \
  __MSL_CONVERGENT T simd_xor(T v) { return __reduce(v, [](T a, T b) { return T(a ^ b); }); }

// ---- shuffles -------------------------------------------------------------------------------------

#define __MSL_SHUFFLE(T)                                                                           \
  __MSL_CONVERGENT T simd_shuffle(T v, ushort lane) { return __shuffle(v, lane); }                 \
  __MSL_CONVERGENT T simd_broadcast(T v, ushort lane) { return __shuffle(v, lane); }               \
  __MSL_CONVERGENT T simd_broadcast_first(T v) {                                                   \
    __slots<T> s = __exchange(v);                                                                  \
    return s[__builtin_ctz(s.mask)];                                                               \
  }                                                                                                \
  __MSL_CONVERGENT T simd_shuffle_xor(T v, ushort m) { return __shuffle(v, __msl_lane() ^ m); }    \
  __MSL_CONVERGENT T simd_shuffle_down(T v, ushort d) {                                            \
    uint l = __msl_lane() + d;                                                                     \
    return __shuffle(v, l > 31 ? __msl_lane() : l);                                                \
  }                                                                                                \
  __MSL_CONVERGENT T simd_shuffle_up(T v, ushort d) {                                              \
    uint l = __msl_lane();                                                                         \
    return __shuffle(v, l < d ? l : l - d);                                                        \
  }                                                                                                \
  __MSL_CONVERGENT T simd_shuffle_rotate_down(T v, ushort d) {                                     \
    return __shuffle(v, (__msl_lane() + d) & 31);                                                  \
  }                                                                                                \
  __MSL_CONVERGENT T simd_shuffle_rotate_up(T v, ushort d) {                                       \
    return __shuffle(v, (__msl_lane() - d) & 31);                                                  \
  }                                                                                                \
  __MSL_CONVERGENT T simd_shuffle_and_fill_down(T v, T fill, ushort d) {                           \
    uint l = __msl_lane() + d;                                                                     \
    T inside = __shuffle(v, l & 31), outside = __shuffle(fill, l & 31);                            \
    return l > 31 ? outside : inside;                                                              \
  }                                                                                                \
  __MSL_CONVERGENT T simd_shuffle_and_fill_up(T v, T fill, ushort d) {                             \
    uint l = __msl_lane();                                                                         \
    T inside = __shuffle(v, (l - d) & 31), outside = __shuffle(fill, (l - d) & 31);                \
    return l < d ? outside : inside;                                                               \
  }                                                                                                \
  __MSL_CONVERGENT T quad_shuffle_xor(T v, ushort m) {                                             \
    return __shuffle(v, __msl_lane() ^ (m & 3));                                                   \
  }                                                                                                \
  __MSL_CONVERGENT T quad_shuffle(T v, ushort lane) {                                              \
    return __shuffle(v, (__msl_lane() & ~3u) | (lane & 3));                                        \
  }                                                                                                \
  __MSL_CONVERGENT T quad_broadcast(T v, ushort lane) {                                            \
    return __shuffle(v, (__msl_lane() & ~3u) | (lane & 3));                                        \
  }

// No bfloat and no 64-bit overloads: the Metal library has none. MLX's own prelude adds bfloat ones
// on top of the __metal_simd_* builtins below.
#define __MSL_INTEGERS(M) M(char) M(uchar) M(short) M(ushort) M(int) M(uint)
#define __MSL_SCALARS(M) __MSL_INTEGERS(M) M(float) M(half)
#define __MSL_SHUFFLE_VECTORS(T) __MSL_SHUFFLE(T##2) __MSL_SHUFFLE(T##3) __MSL_SHUFFLE(T##4)
__MSL_SCALARS(__MSL_REDUCE)
__MSL_INTEGERS(__MSL_REDUCE_BITS)
__MSL_SCALARS(__MSL_SHUFFLE)
__MSL_SCALARS(__MSL_SHUFFLE_VECTORS)

template <class T, int N> __MSL_CONVERGENT vec<T, N> simd_sum(vec<T, N> v) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = simd_sum(T(v[i]));
  return r;
}
template <class T, int N> __MSL_CONVERGENT vec<T, N> simd_max(vec<T, N> v) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = simd_max(T(v[i]));
  return r;
}

// ---- votes ------------------------------------------------------------------------------------------

__MSL_CONVERGENT bool simd_all(bool v) {
  return __reduce(uint(v), [](uint a, uint b) { return a & b; }) != 0;
}
__MSL_CONVERGENT bool simd_any(bool v) {
  return __reduce(uint(v), [](uint a, uint b) { return a | b; }) != 0;
}
struct simd_vote {
  typedef ulong vote_t;
  ulong v;
  explicit simd_vote(ulong x) : v(x) {}
  explicit operator ulong() const { return v; }
  bool all() const { return v == 0xffffffffu; }
  bool any() const { return v != 0; }
};
__MSL_CONVERGENT simd_vote simd_ballot(bool p) {
  uint mine = p ? 1u << __msl_lane() : 0u;
  return simd_vote(ulong(__reduce(mine, [](uint a, uint b) { return a | b; })));
}
__MSL_CONVERGENT simd_vote simd_active_threads_mask() { return simd_ballot(true); }
__MSL_CONVERGENT bool simd_is_first() {
  __slots<uint> s = __exchange(0u);
  return __msl_lane() == uint(__builtin_ctz(s.mask));
}

// ---- the compiler's own spellings, which MLX's headers use ---------------------------------------

#define __MSL_BUILTIN(name) \
  template <class T> __MSL_CONVERGENT T __metal_simd_##name(T v) { return simd_##name(v); }
#define __MSL_BUILTIN_LANE(name)                                          \
  template <class T> __MSL_CONVERGENT T __metal_simd_##name(T v, ushort lane) { \
    return simd_##name(v, lane);                                          \
  }
__MSL_BUILTIN(sum) __MSL_BUILTIN(product) __MSL_BUILTIN(max) __MSL_BUILTIN(min)
__MSL_BUILTIN(prefix_inclusive_sum) __MSL_BUILTIN(prefix_exclusive_sum)
__MSL_BUILTIN(prefix_inclusive_product) __MSL_BUILTIN(prefix_exclusive_product)
__MSL_BUILTIN_LANE(shuffle) __MSL_BUILTIN_LANE(shuffle_xor) __MSL_BUILTIN_LANE(broadcast)
__MSL_BUILTIN_LANE(shuffle_up) __MSL_BUILTIN_LANE(shuffle_down)
__MSL_BUILTIN_LANE(shuffle_rotate_up) __MSL_BUILTIN_LANE(shuffle_rotate_down)
template <class T>
__MSL_CONVERGENT T __metal_simd_shuffle_and_fill_up(T v, T fill, ushort d, ushort) {
  return simd_shuffle_and_fill_up(v, fill, d);
}
template <class T>
__MSL_CONVERGENT T __metal_simd_shuffle_and_fill_down(T v, T fill, ushort d, ushort) {
  return simd_shuffle_and_fill_down(v, fill, d);
}
__MSL_INLINE float __metal_simd_xor(float v) {  // MLX instantiates its body, nothing calls it
  __msl_fail("simd_xor of a float");
  return v;
}
__MSL_INLINE ushort __metal_get_simdgroup_size(ushort) { return 32; }
__MSL_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) { return ushort(__msl_lane()); }

}  // namespace metal
