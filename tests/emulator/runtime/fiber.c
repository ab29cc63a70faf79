// Switching between the threads of a threadgroup: callee-saved registers and the stack pointer.
#include "mslrt.h"

#include <string.h>

#ifdef __APPLE__
#define BEGIN ".text\n.globl _msl_switch\n.p2align 2\n_msl_switch:\n"
#define END ""
#else
#define BEGIN ".text\n.globl msl_switch\n.type msl_switch,%function\n.p2align 4\nmsl_switch:\n"
#define END ".size msl_switch, .-msl_switch\n"
#endif

#if defined(__x86_64__)

__asm__(BEGIN
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n" END);

enum { SAVED_REGISTERS = 6 };

void *fiber_prepare(char *stack_top, void (*function)(void)) {
  void **sp = (void **)((uintptr_t)stack_top & ~(uintptr_t)15);
  *--sp = NULL; // the return address of `function`, and what aligns its frame
  *--sp = (void *)function;
  for (int i = 0; i < SAVED_REGISTERS; i++) *--sp = NULL;
  return sp;
}

#elif defined(__aarch64__)

__asm__(BEGIN
        "sub sp, sp, #176\n"
        "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
        "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
        "mov x9, sp\n"
        "str x9, [x0]\n"
        "mov sp, x1\n"
        "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
        "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
        "add sp, sp, #176\n"
        "ret\n" END);

enum { FRAME_BYTES = 176, LINK_REGISTER = 11 };

void *fiber_prepare(char *stack_top, void (*function)(void)) {
  void **sp = (void **)(((uintptr_t)stack_top & ~(uintptr_t)15) - FRAME_BYTES);
  memset(sp, 0, FRAME_BYTES);
  sp[LINK_REGISTER] = (void *)function;
  return sp;
}

#else
#error "mslrt: no context switch for this CPU; x86-64 and aarch64 have one"
#endif
