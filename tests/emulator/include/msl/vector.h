// Vectors, their constructors, and the casts between them.
#pragma once
#pragma clang system_header

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// Element type and number of lanes; 0 lanes means "not a vector".
template <class V> struct __vt {
  static constexpr constant int n = 0;
  typedef V elem;
};
template <class T, int N> struct __vt<T __attribute__((ext_vector_type(N)))> {
  static constexpr constant int n = N;
  typedef T elem;
};

// Vectors of bool, a byte per lane: clang's own take a bit per lane, and OpenCL has none.
template <int N> struct __bool_lanes;
template <> struct alignas(2) __bool_lanes<2> { bool x, y; };
template <> struct alignas(4) __bool_lanes<3> { bool x, y, z; };
template <> struct alignas(4) __bool_lanes<4> { bool x, y, z, w; };
template <int N> struct __bools : __bool_lanes<N> {
  __bools() = default;
  template <class... A, class = enable_if_t<sizeof...(A) == N>>
  constexpr __bools(A... lanes) : __bool_lanes<N>{bool(lanes)...} {}
  template <class V, class = enable_if_t<__vt<V>::n == N>, class = void> __bools(V lanes) {
    for (int i = 0; i < N; i++) (*this)[i] = lanes[i] != 0;
  }
  thread bool &operator[](int i) { return ((thread bool *)this)[i]; }
  bool operator[](int i) const { return ((const thread bool *)this)[i]; }
};
template <int N> struct __vt<__bools<N>> {
  static constexpr constant int n = N;
  typedef bool elem;
};

template <class V> struct __width {
  static constexpr constant int n = __vt<V>::n ? __vt<V>::n : 1;
};

template <class To, class From> __MSL_INLINE constexpr To __convert(From f) {
  if constexpr ((is_same_v<To, half> && is_same_v<From, bfloat>) ||
                (is_same_v<To, bfloat> && is_same_v<From, half>))
    return static_cast<To>(static_cast<float>(f));
  else
    return static_cast<To>(f);
}

template <class V, int at, class A> __MSL_INLINE constexpr void __put(thread V &r, A a) {
  typedef typename __vt<V>::elem E;
  if constexpr (__vt<A>::n == 0)
    r[at] = __convert<E>(a);
  else
    for (int k = 0; k < __vt<A>::n; k++) r[at + k] = __convert<E>(a[k]);
}
template <class V, int at> __MSL_INLINE constexpr void __fill(thread V &) {}
template <class V, int at, class A, class... R>
__MSL_INLINE constexpr void __fill(thread V &r, A a, R... rest) {
  __put<V, at>(r, a);
  __fill<V, at + __width<A>::n>(r, rest...);
}

// Metal's constructor syntax `float4(a, b.xy, 1)`: ../../rewrite.py turns `float4(`, `vec<..>(` and
// aliases of those into `metal::__make<float4>(`.
template <class V> __MSL_INLINE constexpr V __make() { return V(); }
template <class V, class A> __MSL_INLINE constexpr V __make(A a) {
  if constexpr (__vt<V>::n == 0) {
    if constexpr (is_arithmetic_v<V> && is_arithmetic_v<A>)
      return __convert<V>(a);
    else
      return V(a);
  } else {
    typedef typename __vt<V>::elem E;
    V r{};
    if constexpr (__vt<A>::n == 0) {
      for (int i = 0; i < __vt<V>::n; i++) r[i] = __convert<E>(a);
    } else {
      static_assert(__vt<A>::n == __vt<V>::n, "vector constructor: wrong number of components");
      for (int i = 0; i < __vt<V>::n; i++) r[i] = __convert<E>(a[i]);
    }
    return r;
  }
}
template <class V, class A, class B, class... R>
__MSL_INLINE constexpr V __make(A a, B b, R... rest) {
  if constexpr (__vt<V>::n == 0) {
    return V(a, b, rest...);
  } else {
    static_assert((__width<A>::n + __width<B>::n + (0 + ... + __width<R>::n)) == __vt<V>::n,
                  "vector constructor: wrong number of components");
    V r{};
    __fill<V, 0>(r, a, b, rest...);
    return r;
  }
}
// `{a, b, c}` as an argument where a vector is wanted.
template <class... A> struct __braced;
template <> struct __braced<> {
  template <class V, int at> constexpr void fill(thread V &) const {}
};
template <class A, class... R> struct __braced<A, R...> {
  A first;
  __braced<R...> rest;
  constexpr __braced(A a, R... r) : first(a), rest(r...) {}
  template <class V, int at> constexpr void fill(thread V &v) const {
    __put<V, at>(v, first);
    rest.template fill<V, at + __width<A>::n>(v);
  }
  template <class V, class = enable_if_t<__vt<V>::n == (__width<A>::n + ... + __width<R>::n)>>
  constexpr operator V() const {
    V v{};
    fill<V, 0>(v);
    return v;
  }
};
template <class... A> __MSL_INLINE constexpr __braced<A...> __braces(A... a) {
  return __braced<A...>(a...);
}
template <class V, class... A> __MSL_INLINE constexpr V __make(__braced<A...> a) { return a; }

// `x = *(const device T *)q;` and `*(threadgroup T *)p = *(const device T *)q;`, also where T is a
// struct: C++ does not copy structs between address spaces.
template <class P> __MSL_INLINE auto __load(P p) {
  typedef remove_cv_t<remove_pointer_t<P>> T;
  if constexpr (__is_class(T))
    return *(const thread T *)(ulong)p;
  else
    return T(*p);
}
template <class To, class From> __MSL_INLINE void __assign(To to, From from) {
  typedef remove_addrspace_t<remove_pointer_t<To>> T;
  if constexpr (__is_class(T)) {
    static_assert(is_same_v<T, remove_cv_t<remove_pointer_t<From>>>, "structs of two types");
    *(thread T *)(ulong)to = *(const thread T *)(ulong)from;
  } else {
    *to = *from;
  }
}
// `static_cast<X>(` where X names a vector or a template parameter.
template <class V, class A> __MSL_INLINE constexpr V __static_cast(A a) { return __make<V>(a); }

}  // namespace metal

typedef metal::__bools<2> bool2;
typedef metal::__bools<3> bool3;
typedef metal::__bools<4> bool4;

template <class To, class From> __MSL_INLINE constexpr To as_type(From f) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, f);
}
namespace metal {
using ::as_type;
}
