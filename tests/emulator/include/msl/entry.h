// How the runtime's arguments reach a kernel's parameters: see entry_point() in ../../rewrite.py.
#pragma once
#pragma clang system_header

// Must match ThreadIds in ../../runtime/mslrt.h. The fields are Metal's attribute names.
struct __msl_tid {
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3];
  uint threadgroup_position_in_grid[3], threads_per_threadgroup[3], threadgroups_per_grid[3];
  uint threads_per_grid[3], dispatch_threads_per_threadgroup[3], grid_origin[3];
  uint thread_index_in_threadgroup[1], simdgroup_index_in_threadgroup[1];
  uint thread_index_in_simdgroup[1], simdgroups_per_threadgroup[1];
  uint dispatch_simdgroups_per_threadgroup[1], threads_per_simdgroup[1], thread_execution_width[1];
  uint quadgroup_index_in_threadgroup[1], thread_index_in_quadgroup[1];
  uint quadgroups_per_threadgroup[1], dispatch_quadgroups_per_threadgroup[1];
};

// A bound buffer: becomes the pointer or reference that the parameter asks for.
struct __msl_arg {
  ulong p;
  template <class T> operator device T *() const { return (device T *)p; }
  template <class T> operator constant T *() const { return (constant T *)p; }
  template <class T> operator threadgroup T *() const { return (threadgroup T *)p; }
  template <class T> operator device T &() const { return *(device T *)p; }
  template <class T> operator constant T &() const { return *(constant T *)p; }
};

template <class T, int N> struct __msl_index {
  static T get(const thread uint *f) {
    T r;
    for (int i = 0; i < N; i++) r[i] = f[i];
    return r;
  }
};
template <class T> struct __msl_index<T, 0> {
  static T get(const thread uint *f) { return T(f[0]); }
};
template <class T> __MSL_INLINE T __msl_id(const thread uint *f) {
  return __msl_index<T, metal::__vt<T>::n>::get(f);
}
