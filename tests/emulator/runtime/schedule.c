// Who runs next: barriers, simdgroup functions and the end of a thread.
//
// A fiber runs until it reaches a rendezvous that others have not reached. The lanes of its
// simdgroup are tried first, then the other simdgroups. When no thread can run, threads wait at
// different places: that is the fault called divergence.
#include "mslrt.h"

#include <stdlib.h>
#include <string.h>

static inline uint32_t bit(uint32_t lane) { return 1u << lane; }

static inline uint32_t count(uint32_t mask) { return (uint32_t)__builtin_popcount(mask); }

static inline uint32_t lowest(uint32_t mask) { return (uint32_t)__builtin_ctz(mask); }

// The first ready lane after `lane`, in ring order.
static inline uint32_t ring_next(uint32_t ready, uint32_t lane) {
  uint32_t higher = lane >= SIMD_WIDTH - 1 ? 0 : ready & (~0u << (lane + 1));
  return lowest(higher ? higher : ready);
}

static void add_site(FaultRecord *fault, void *site) {
  uint64_t offset = (uint64_t)((uintptr_t)site - 1 - module_base);
  for (uint32_t i = 0; i < fault->num_sites; i++)
    if (fault->sites[i] == offset) return;
  if (fault->num_sites < MAX_SITES) fault->sites[fault->num_sites++] = offset;
}

static bool is_waiting(const Worker *w, const Fiber *fiber) {
  const Simdgroup *group = &w->simdgroups[fiber->simdgroup];
  return (group->at_simd | group->at_barrier) & bit(fiber->lane);
}

static _Noreturn void divergence(void) {
  Worker *w = worker;
  // The last to arrive is blamed, or, when the last event was a return, a thread it left waiting.
  if (!is_waiting(w, &w->fibers[w->current]))
    for (w->current = 0; !is_waiting(w, &w->fibers[w->current]);) w->current++;
  FaultRecord fault = fault_here(FAULT_DIVERGENCE);
  fault.returned = w->num_done;
  for (uint32_t s = 0; s < w->num_simdgroups; s++) {
    Simdgroup *group = &w->simdgroups[s];
    fault.waiting_simd += count(group->at_simd);
    fault.waiting_barrier += count(group->at_barrier);
    for (uint32_t m = group->at_simd | group->at_barrier; m; m &= m - 1)
      add_site(&fault, w->fibers[s * SIMD_WIDTH + lowest(m)].site);
  }
  fault_report(&fault, w->fibers[w->current].site);
  threadgroup_abandon();
}

static uint32_t next_fiber(const Worker *w, const Fiber *fiber) {
  const Simdgroup *own = &w->simdgroups[fiber->simdgroup];
  if (own->ready) return fiber->simdgroup * SIMD_WIDTH + ring_next(own->ready, fiber->lane);
  for (uint32_t k = 1; k < w->num_simdgroups; k++) {
    uint32_t s = (fiber->simdgroup + k) % w->num_simdgroups;
    if (w->simdgroups[s].ready) return s * SIMD_WIDTH + lowest(w->simdgroups[s].ready);
  }
  divergence();
}

// Leave the current fiber, whose state is already recorded, until it is ready again.
static void run_others(void) {
  Worker *w = worker;
  Fiber *fiber = &w->fibers[w->current];
  uint32_t next = next_fiber(w, fiber);
  w->switches++;
  w->current = next;
  msl_switch(&fiber->stack_pointer, w->fibers[next].stack_pointer);
}

static void release_simd(Simdgroup *group) {
  group->lanes_released[group->generation & 1] = group->at_simd;
  group->generation++;
  group->ready |= group->at_simd;
  group->at_simd = 0;
}

// Arrive at a simdgroup rendezvous and wait for the others. True in one lane: the last to arrive, or,
// when another's return ended the wait, the first to resume. That lane reduces for all.
static bool arrive_simd(Fiber *fiber, Simdgroup *group, void *site) {
  fiber->site = site;
  if (!group->at_simd) group->site = site;
  bool elsewhere = group->site != site;
  group->at_simd |= bit(fiber->lane);
  if (elsewhere) divergence();
  if (count(group->at_simd) == group->num_lanes - count(group->done)) {
    release_simd(group);
    return true;
  }
  group->ready &= ~bit(fiber->lane);
  run_others();
  bool stands_in = group->released_by_return;
  group->released_by_return = false;
  return stands_in;
}

void fiber_main(void) {
  Worker *w = worker;
  ((KernelEntry)w->launch->entry)(w->arguments, &w->fibers[w->current].ids);
  Fiber *fiber = &w->fibers[w->current];
  Simdgroup *group = &w->simdgroups[fiber->simdgroup];
  group->ready &= ~bit(fiber->lane);
  group->done |= bit(fiber->lane);
  w->num_done++;
  // An early return: the lanes that are left may have been waiting for this one only.
  if (group->at_simd && count(group->at_simd) == group->num_lanes - count(group->done)) {
    release_simd(group);
    group->released_by_return = true;
  }
  if (w->num_done == w->num_threads) msl_switch(&fiber->stack_pointer, w->main_stack_pointer);
  run_others();
  abort(); // a finished fiber is never ready
}

// ---- called by the kernel (declared in msl_prefix.h) ------------------------------------------

// What a block of a kernel costs, in a build that counts (../counting.py).
void __msl_count(uint64_t instructions) { worker->instructions += instructions; }

uint32_t __msl_lane(void) { return worker->fibers[worker->current].lane; }

// Publish `size` bytes of this lane. Returns the slots of the rendezvous; `mask` says which lanes
// took part, `last` is 1 in the lane that reduces.
void *__msl_simd(const void *value, uint32_t size, uint32_t *mask, int *last) {
  Worker *w = worker;
  Fiber *fiber = &w->fibers[w->current];
  Simdgroup *group = &w->simdgroups[fiber->simdgroup];
  uint32_t parity = group->generation & 1;
  w->simd_operations++;
  memcpy(group->slots[parity] + fiber->lane * SLOT_SIZE, value, size);
  *last = arrive_simd(fiber, group, __builtin_return_address(0));
  *mask = group->lanes_released[parity];
  return group->slots[parity];
}

void __msl_sg_barrier(uint32_t flags) {
  Worker *w = worker;
  Fiber *fiber = &w->fibers[w->current];
  Simdgroup *group = &w->simdgroups[fiber->simdgroup];
  bool last = arrive_simd(fiber, group, __builtin_return_address(0));
  if (last && (flags & MEM_THREADGROUP)) group->memory_epoch++;
}

void __msl_tg_barrier(uint32_t flags) {
  Worker *w = worker;
  Fiber *fiber = &w->fibers[w->current];
  Simdgroup *group = &w->simdgroups[fiber->simdgroup];
  fiber->site = __builtin_return_address(0);
  w->barriers++;
  group->ready &= ~bit(fiber->lane);
  group->at_barrier |= bit(fiber->lane);
  if (w->num_at_barrier++ == 0) w->barrier_site = fiber->site;
  if (w->barrier_site != fiber->site) divergence();
  // Every thread must arrive: one that has returned never will.
  if (w->num_at_barrier < w->num_threads) {
    run_others();
    return;
  }
  for (uint32_t s = 0; s < w->num_simdgroups; s++) {
    w->simdgroups[s].ready |= w->simdgroups[s].at_barrier;
    w->simdgroups[s].at_barrier = 0;
  }
  w->num_at_barrier = 0;
  if (flags & MEM_THREADGROUP) w->threadgroup_epoch++;
  if (flags & MEM_DEVICE) w->device_epoch++;
}

// The address of a threadgroup variable; the first thread to come by places it.
void *__msl_tg_var(int id, uint64_t size, uint64_t align, const char *name) {
  Worker *w = worker;
  FaultRecord fault;
  if (id < 0 || id >= MAX_VARIABLES) {
    fault = fault_here(FAULT_MISUSE);
    strncpy(fault.name, "more than 256 threadgroup variables", NAME_SIZE - 1);
    fault_report(&fault, __builtin_return_address(0));
    threadgroup_abandon();
  }
  ThreadgroupVariable *variable = &w->variables[id];
  if (variable->size) return w->arena + variable->offset;
  if (align < 16) align = 16;
  uint64_t offset = (w->arena_used + align - 1) & ~(align - 1);
  uint64_t red_zone = w->launch->check ? RED_ZONE : 0;
  uint64_t declared = w->declared_bytes + ((size + 15) & ~15ull);
  if (declared > w->launch->threadgroup_limit || offset + size + red_zone > THREADGROUP_ARENA) {
    fault = fault_here(FAULT_THREADGROUP_LIMIT);
    fault.size = declared;
    fault.extent = w->launch->threadgroup_limit;
    strncpy(fault.name, name, NAME_SIZE - 1);
    fault_report(&fault, __builtin_return_address(0));
    threadgroup_abandon();
  }
  *variable = (ThreadgroupVariable){(uint32_t)offset, (uint32_t)size, name};
  w->declared_bytes = (uint32_t)declared;
  w->arena_used = (uint32_t)(offset + size + red_zone);
  if (w->launch->check) w->cells_used = w->arena_used;
  if ((uint32_t)id >= w->num_variables) w->num_variables = (uint32_t)id + 1;
  return w->arena + offset;
}

void __msl_fail(const char *message) {
  FaultRecord fault = fault_here(FAULT_MISUSE);
  strncpy(fault.name, message, NAME_SIZE - 1);
  fault_report(&fault, __builtin_return_address(0));
  threadgroup_abandon();
}
