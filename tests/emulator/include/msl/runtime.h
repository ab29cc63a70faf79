// What kernels call in libmslrt (../../runtime).
#pragma once
#pragma clang system_header

extern "C" {
__attribute__((convergent)) void __msl_tg_barrier(uint flags);
__attribute__((convergent)) void __msl_sg_barrier(uint flags);
// Publishes `size` bytes of this lane; returns the 33 slots of 64 bytes of the rendezvous: one per
// lane, one for a result. mask: the lanes that take part. last: 1 for the lane that is to reduce.
__attribute__((convergent)) thread void *__msl_simd(const thread void *value, uint size,
                                                    thread uint *mask, thread int *last);
thread void *__msl_tg_var(int id, ulong size, ulong align, __MSL_STR name);
void __msl_fail(__MSL_STR message);
// An access that the instrumentation does not see; `access` is an enum of mslrt.h.
void __msl_note(const thread void *pointer, uint size, int access);
uint __msl_lane(void);
}
