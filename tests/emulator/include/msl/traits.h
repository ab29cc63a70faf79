// <metal_type_traits>.
#pragma once
#pragma clang system_header

namespace metal {

template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr constant bool is_same_v = is_same<A, B>::value;

template <class T> struct remove_addrspace { typedef T type; };
#define __MSL_REMOVE(space)                                                \
  template <class T> struct remove_addrspace<space T> { typedef T type; }; \
  template <class T> struct remove_addrspace<const space T> { typedef const T type; };
__MSL_REMOVE(device) __MSL_REMOVE(threadgroup)
#ifdef __OPENCL_CPP_VERSION__
__MSL_REMOVE(constant) __MSL_REMOVE(thread)
#else
template <class T> struct remove_addrspace<constant T> { typedef const T type; };
#endif
#undef __MSL_REMOVE
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> struct remove_cv {
  typedef typename remove_const<remove_addrspace_t<T>>::type type;
};
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_reference { typedef T type; };
template <class T> struct remove_reference<T &> { typedef T type; };
template <class T> struct remove_reference<T &&> { typedef T type; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <class T> struct remove_pointer { typedef T type; };
template <class T> struct remove_pointer<T *> { typedef T type; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;

template <class T> struct is_integral : false_type {};
#define __MSL_INTEGRAL(T) template <> struct is_integral<T> : true_type {};
__MSL_INTEGRAL(bool) __MSL_INTEGRAL(char) __MSL_INTEGRAL(signed char) __MSL_INTEGRAL(uchar)
__MSL_INTEGRAL(short) __MSL_INTEGRAL(ushort) __MSL_INTEGRAL(int) __MSL_INTEGRAL(uint)
__MSL_INTEGRAL(long) __MSL_INTEGRAL(ulong)
#undef __MSL_INTEGRAL
template <class T> constexpr constant bool is_integral_v = is_integral<T>::value;
template <class T> struct is_floating_point : false_type {};
template <> struct is_floating_point<float> : true_type {};
template <> struct is_floating_point<half> : true_type {};
template <> struct is_floating_point<bfloat> : true_type {};
template <class T> constexpr constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <class T> constexpr constant bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T>
struct is_unsigned : bool_constant<is_integral<T>::value && (T(-1) > T(0))> {};
template <class T>
struct is_signed : bool_constant<is_arithmetic<T>::value && (T(-1) < T(0))> {};
template <class T> constexpr constant bool is_unsigned_v = is_unsigned<T>::value;
template <class T> constexpr constant bool is_signed_v = is_signed<T>::value;
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <class A, class B>
constexpr constant bool is_convertible_v = is_convertible<A, B>::value;

// Names MLX's headers take from the Metal library's inside.
template <class... B> struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B> struct _conjunction : bool_constant<(B::value && ...)> {};

// <metal_array>.
template <class T, size_t N> struct array {
  T __elements[N];
  constexpr size_t size() const { return N; }
  thread T &operator[](size_t i) { return *(thread T *)&__elements[i]; }
  const thread T &operator[](size_t i) const { return *(const thread T *)&__elements[i]; }
};

// <metal_uniform>: a promise that all threads have the same value, which the host does not use.
template <class T> using uniform = T;
template <class T> __MSL_INLINE constexpr T make_uniform(T value) { return value; }

}  // namespace metal
