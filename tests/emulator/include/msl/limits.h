// <metal_limits>.
#pragma once
#pragma clang system_header

namespace metal {

template <class T> struct numeric_limits {
  static constexpr constant bool is_signed = !is_unsigned<T>::value;
  static constexpr T max() {
    return is_signed ? T((1ul << (sizeof(T) * 8 - 1)) - 1) : T(~T(0));
  }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};

#define __MSL_FLOAT_LIMITS(T, largest, smallest, step)                          \
  template <> struct numeric_limits<T> {                                        \
    static constexpr constant bool is_signed = true;                            \
    static constexpr T max() { return T(largest); }                             \
    static constexpr T lowest() { return T(-largest); }                         \
    static constexpr T min() { return T(smallest); }                            \
    static constexpr T infinity() { return T(__builtin_inff()); }               \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }            \
    static constexpr T epsilon() { return T(step); }                            \
  };
__MSL_FLOAT_LIMITS(float, 3.40282346638528859812e+38f, 1.17549435e-38f, 1.1920928955078125e-7f)
__MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f)
__MSL_FLOAT_LIMITS(bfloat, 3.3895313892515355e+38f, 1.17549435e-38f, 0.0078125f)
#undef __MSL_FLOAT_LIMITS

}  // namespace metal
