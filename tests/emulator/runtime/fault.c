// Recording what a kernel did wrong. Each distinct (kind, code address) is kept once and counted.
#include "mslrt.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t faults_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool stopped;

void faults_reset(Launch *launch) {
  launch->num_faults = launch->num_kept = 0;
  atomic_store(&stopped, false);
}

bool faults_stopped(void) { return atomic_load_explicit(&stopped, memory_order_relaxed); }

void faults_stop(void) { atomic_store(&stopped, true); }

FaultRecord fault_here(FaultKind kind) {
  const Worker *w = worker;
  const Fiber *fiber = &w->fibers[w->current];
  FaultRecord fault = {.kind = kind, .buffer = -1, .has_thread = 1};
  memcpy(fault.group, w->group_position, sizeof fault.group);
  memcpy(fault.thread, fiber->ids.position_in_threadgroup, sizeof fault.thread);
  fault.simdgroup = fiber->ids.simdgroup_index;
  fault.lane = fiber->lane;
  return fault;
}

void fault_report(FaultRecord *fault, void *return_address) {
  // A return address is one past the call; step back into it.
  fault->site = return_address ? (uint64_t)((uintptr_t)return_address - 1 - module_base) : 0;
  Launch *launch = worker->launch;
  pthread_mutex_lock(&faults_lock);
  launch->num_faults++;
  bool known = false;
  for (uint32_t i = 0; i < launch->num_kept && !known; i++) {
    FaultRecord *kept = &launch->faults[i];
    known = kept->kind == fault->kind && kept->site == fault->site;
    kept->repeats += known;
  }
  if (!known && launch->num_kept < MAX_FAULTS) launch->faults[launch->num_kept++] = *fault;
  pthread_mutex_unlock(&faults_lock);
}

_Noreturn void threadgroup_abandon(void) {
  faults_stop();
  void *unused;
  msl_switch(&unused, worker->main_stack_pointer);
  abort();
}
