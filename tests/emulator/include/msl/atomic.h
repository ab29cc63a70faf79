// <metal_atomic>: relaxed order only, as in Metal, and fences.
//
// The instrumentation of check mode leaves atomic instructions alone; each tells the runtime itself.
#pragma once
#pragma clang system_header

namespace metal {

enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };  // the second: fences only
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};
template <class T> struct atomic { T __v; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;

enum { __msl_atomic = 2, __msl_atomic_store = 3 };  // Access in mslrt.h

// The builtins want all their pointers in one address space; the host has only one.
#define __MSL_ATOMIC(AS)                                                                         \
  template <class T> __MSL_INLINE thread T *__flat(const volatile AS atomic<T> *p) {             \
    return (thread T *)(ulong)p;                                                                 \
  }                                                                                              \
  template <class T> __MSL_INLINE T atomic_load_explicit(const volatile AS atomic<T> *p,         \
                                                      memory_order) {                            \
    __msl_note((const thread void *)(ulong)p, sizeof(T), __msl_atomic);                          \
    T r;                                                                                         \
    __atomic_load(__flat(p), &r, 0);                                                             \
    return r;                                                                                    \
  }                                                                                              \
  template <class T>                                                                             \
  __MSL_INLINE void atomic_store_explicit(volatile AS atomic<T> *p, T v, memory_order) {         \
    __msl_note((const thread void *)(ulong)p, sizeof(T), __msl_atomic_store);                    \
    __atomic_store(__flat(p), &v, 0);                                                            \
  }                                                                                              \
  template <class T, class U, class F>                                                           \
  __MSL_INLINE T __atomic_update(volatile AS atomic<T> *p, U v, F f) {                           \
    __msl_note((const thread void *)(ulong)p, sizeof(T), __msl_atomic);                          \
    T old, next;                                                                                 \
    thread T *q = __flat(p);                                                                     \
    __atomic_load(q, &old, 0);                                                                   \
    do next = f(old, T(v));                                                                      \
    while (!__atomic_compare_exchange(q, &old, &next, false, 0, 0));                             \
    return old;                                                                                  \
  }                                                                                              \
  template <class T> __MSL_INLINE bool atomic_compare_exchange_weak_explicit(                    \
      volatile AS atomic<T> *p, thread T *expected, T desired, memory_order, memory_order) {     \
    __msl_note((const thread void *)(ulong)p, sizeof(T), __msl_atomic);                          \
    return __atomic_compare_exchange(__flat(p), expected, &desired, false, 0, 0);                \
  }                                                                                              \
  __MSL_UPDATE(AS, exchange, b)                                                                  \
  __MSL_UPDATE(AS, fetch_add, T(a + b))                                                          \
  __MSL_UPDATE(AS, fetch_sub, T(a - b))                                                          \
  __MSL_UPDATE(AS, fetch_max, a < b ? b : a)                                                     \
  __MSL_UPDATE(AS, fetch_min, b < a ? b : a)                                                     \
  __MSL_UPDATE(AS, fetch_and, T(a & b))                                                          \
  __MSL_UPDATE(AS, fetch_or, T(a | b))                                                           \
  __MSL_UPDATE(AS, fetch_xor, T(a ^ b))
#define __MSL_UPDATE(AS, name, result)                                                           \
  template <class T, class U>                                                                    \
  __MSL_INLINE T atomic_##name##_explicit(volatile AS atomic<T> *p, U v, memory_order) {         \
    return __atomic_update(p, v, []([[maybe_unused]] T a, T b) { return result; });              \
  }
__MSL_ATOMIC(device)
__MSL_ATOMIC(threadgroup)
#undef __MSL_ATOMIC
#undef __MSL_UPDATE

// Orders a thread's own accesses; it is no barrier, and check mode takes it for none.
__MSL_INLINE void atomic_thread_fence(mem_flags, memory_order,
                                      thread_scope = thread_scope_device) {
  __atomic_thread_fence(5);
}

// MLX's logging.h names it; the emulator logs nothing.
struct os_log {
  template <class A, class B> constexpr os_log(A, B) {}
#ifdef __OPENCL_CPP_VERSION__  // a logger is `constant` there; see construct_constants in rewrite.py
  template <class A, class B> constexpr os_log(A, B) constant {}
  template <class... A> void log_debug(A...) const constant {}
#endif
  template <class... A> void log_debug(A...) const {}
  template <class... A> void log(A...) const {}
};

}  // namespace metal
