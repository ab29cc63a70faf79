// One dispatch: memory for buffers and workers, threadgroups handed out, memory faults caught.
#include "mslrt.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ucontext.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

enum { MAX_WORKERS = 16, SIGNAL_STACK = 64 << 10, STACK_TOP_MARGIN = 64 };
static const uint64_t GUARD = 256ull << 20; // unreadable space on both sides of a buffer

_Thread_local Worker *worker;
uintptr_t module_base;

static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;
static Worker *workers[MAX_WORKERS]; // kept between launches: their stacks are costly to map
static atomic_uint_fast64_t next_group;
static uint64_t num_groups;

int32_t nearest_buffer(const Launch *launch, uintptr_t address); // check.c

// ../launch.py compares these with its own structures before the first launch.
uint64_t msl_record_size(void) { return sizeof(FaultRecord); }
uint64_t msl_launch_size(void) { return sizeof(Launch); }

static uint64_t page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

// ---- buffers -----------------------------------------------------------------------------------

// Memory whose end, rounded up to 16 bytes, touches an unreadable page. NULL: no memory.
void *msl_guard_allocate(uint64_t size, void **base, uint64_t *total) {
  uint64_t page = page_size(), used = (size + 15) & ~15ull;
  uint64_t mapped = (used + page - 1) & ~(page - 1);
  *total = mapped + 2 * GUARD;
  char *m = mmap(NULL, *total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return NULL;
  *base = m;
  if (mapped && mprotect(m + GUARD, mapped, PROT_READ | PROT_WRITE)) {
    munmap(m, *total);
    return NULL;
  }
  memset(m + GUARD, 0xff, mapped - used);
  return m + GUARD + mapped - used;
}

void msl_guard_release(void *base, uint64_t total) { munmap(base, total); }

// ---- memory faults -----------------------------------------------------------------------------

static struct sigaction old_segv, old_bus, old_fpe;

static void *fault_pc(void *context) {
  ucontext_t *c = context;
#if defined(__linux__) && defined(__x86_64__)
  return (void *)c->uc_mcontext.gregs[REG_RIP];
#elif defined(__linux__) && defined(__aarch64__)
  return (void *)c->uc_mcontext.pc;
#elif defined(__APPLE__) && defined(__aarch64__)
  return (void *)__darwin_arm_thread_state64_get_pc(c->uc_mcontext->__ss);
#elif defined(__APPLE__)
  return (void *)c->uc_mcontext->__ss.__rip;
#endif
}

static void restore_handlers(void) {
  sigaction(SIGSEGV, &old_segv, NULL);
  sigaction(SIGBUS, &old_bus, NULL);
  sigaction(SIGFPE, &old_fpe, NULL);
}

static void on_signal(int signal_number, siginfo_t *info, void *context) {
  Worker *w = worker;
  if (!w || !w->can_recover) { // not ours: the fault repeats under the old handler
    restore_handlers();
    return;
  }
  uintptr_t address = (uintptr_t)info->si_addr;
  bool in_stacks = address - (uintptr_t)w->stacks < (uintptr_t)MAX_THREADS * STACK_SIZE;
  FaultRecord fault = fault_here(signal_number == SIGFPE ? FAULT_DIVISION
                                 : in_stacks             ? FAULT_STACK
                                                         : FAULT_MEMORY);
  fault.buffer = nearest_buffer(w->launch, address);
  fault.offset = (int64_t)address;
  if (fault.buffer >= 0) {
    fault.offset -= (int64_t)w->launch->buffers[fault.buffer].address;
    fault.extent = w->launch->buffers[fault.buffer].size;
  }
  fault_report(&fault, (char *)fault_pc(context) + 1);
  siglongjmp(w->recover, 1);
}

static void install_handlers(void) {
  struct sigaction action = {0};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  sigaction(SIGFPE, &action, &old_fpe);
}

// ---- workers -----------------------------------------------------------------------------------

static void *map_memory(uint64_t size) {
  void *m = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  return m == MAP_FAILED ? NULL : m;
}

static Worker *create_worker(void) {
  Worker *w = map_memory(sizeof *w);
  if (!w) return NULL;
  w->stacks = map_memory((uint64_t)MAX_THREADS * STACK_SIZE);
  w->arena = map_memory(THREADGROUP_ARENA);
  w->cells = map_memory(THREADGROUP_ARENA * sizeof *w->cells);
  if (!w->stacks || !w->arena || !w->cells) return NULL;
  for (uint64_t i = 0; i < MAX_THREADS; i++) // an overflow hits an unreadable page
    if (mprotect(w->stacks + i * STACK_SIZE, page_size(), PROT_NONE)) return NULL;
  memset(w->arena, 0xff, THREADGROUP_ARENA);
  return w;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static uint32_t divide_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

static void prepare_simdgroups(Worker *w) {
  w->num_simdgroups = divide_up(w->num_threads, SIMD_WIDTH);
  for (uint32_t s = 0; s < w->num_simdgroups; s++) {
    Simdgroup *group = &w->simdgroups[s];
    group->num_lanes = least(SIMD_WIDTH, w->num_threads - s * SIMD_WIDTH);
    group->ready = group->num_lanes == SIMD_WIDTH ? ~0u : (1u << group->num_lanes) - 1;
    group->at_simd = group->at_barrier = group->done = 0;
    group->generation = group->memory_epoch = 0;
    group->released_by_return = false;
  }
}

static ThreadIds thread_ids(const Worker *w, uint32_t index, const uint32_t size[3],
                            const uint32_t groups[3]) {
  const Launch *launch = w->launch;
  const uint32_t *full = launch->threadgroup;
  uint32_t position[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  uint32_t num_full = full[0] * full[1] * full[2];
  ThreadIds ids = {
      .index_in_threadgroup = index,
      .simdgroup_index = index / SIMD_WIDTH,
      .lane = index % SIMD_WIDTH,
      .simdgroups = divide_up(w->num_threads, SIMD_WIDTH),
      .dispatch_simdgroups = divide_up(num_full, SIMD_WIDTH),
      .threads_per_simdgroup = SIMD_WIDTH,
      .execution_width = SIMD_WIDTH,
      .quadgroup_index = index / 4,
      .lane_in_quadgroup = index % 4,
      .quadgroups = divide_up(w->num_threads, 4),
      .dispatch_quadgroups = divide_up(num_full, 4),
  };
  for (int i = 0; i < 3; i++) {
    ids.position_in_threadgroup[i] = position[i];
    ids.threadgroup_position[i] = w->group_position[i];
    ids.position_in_grid[i] = w->group_position[i] * full[i] + position[i];
    ids.threads_per_threadgroup[i] = size[i]; // smaller at the edge of the grid
    ids.threadgroups_per_grid[i] = groups[i];
    ids.threads_per_grid[i] = launch->grid[i];
    ids.dispatch_threads_per_threadgroup[i] = full[i];
  }
  return ids;
}

static void prepare_threads(Worker *w, const uint32_t size[3], const uint32_t groups[3]) {
  for (uint32_t i = 0; i < w->num_threads; i++) {
    Fiber *fiber = &w->fibers[i];
    fiber->ids = thread_ids(w, i, size, groups);
    fiber->simdgroup = i / SIMD_WIDTH;
    fiber->lane = i % SIMD_WIDTH;
    char *top = w->stacks + (uint64_t)(i + 1) * STACK_SIZE - STACK_TOP_MARGIN;
    fiber->stack_pointer = fiber_prepare(top, fiber_main);
  }
}

void *__msl_tg_var(int id, uint64_t size, uint64_t align, const char *name); // schedule.c

static void prepare_arena(Worker *w) {
  // Nothing survives from the threadgroup before: its values are NaN, its history is empty.
  if (w->arena_used) memset(w->arena, 0xff, w->arena_used);
  check_reset(w);
  w->arena_used = w->declared_bytes = w->num_variables = w->last_variable = 0;
  memset(w->variables, 0, sizeof w->variables);
  const Launch *launch = w->launch;
  for (uint32_t i = 0; i < launch->num_threadgroup_arguments; i++)
    w->arguments[launch->threadgroup_argument_index[i]] = (uintptr_t)__msl_tg_var(
        (int)i, launch->threadgroup_argument_size[i], 16, "threadgroup argument");
}

static void run_threadgroup(Worker *w, uint64_t index) {
  const Launch *launch = w->launch;
  uint32_t groups[3], size[3];
  for (int i = 0; i < 3; i++) groups[i] = divide_up(launch->grid[i], launch->threadgroup[i]);
  w->group = (uint32_t)index;
  w->group_position[0] = (uint32_t)(index % groups[0]);
  w->group_position[1] = (uint32_t)(index / groups[0] % groups[1]);
  w->group_position[2] = (uint32_t)(index / groups[0] / groups[1]);
  for (int i = 0; i < 3; i++)
    size[i] = least(launch->threadgroup[i],
                    launch->grid[i] - w->group_position[i] * launch->threadgroup[i]);
  w->num_threads = size[0] * size[1] * size[2];
  w->num_done = w->num_at_barrier = w->current = 0;
  w->threadgroup_epoch = w->device_epoch = 1;
  prepare_simdgroups(w);
  prepare_threads(w, size, groups);
  if (sigsetjmp(w->recover, 1) == 0) {
    w->can_recover = true;
    prepare_arena(w);
    msl_switch(&w->main_stack_pointer, w->fibers[0].stack_pointer);
  } else {
    faults_stop();
  }
  w->can_recover = false;
  w->threads += w->num_threads;
  if (w->declared_bytes > w->most_declared_bytes) w->most_declared_bytes = w->declared_bytes;
}

static void *work(void *argument) {
  Worker *w = argument;
  char *signal_stack = malloc(SIGNAL_STACK);
  if (!signal_stack) abort();
  stack_t ours = {.ss_sp = signal_stack, .ss_size = SIGNAL_STACK}, before;
  sigaltstack(&ours, &before);
  worker = w;
  for (;;) {
    uint64_t group = atomic_fetch_add(&next_group, 1);
    if (group >= num_groups || faults_stopped()) break;
    run_threadgroup(w, group);
  }
  worker = NULL;
  sigaltstack(&before, NULL);
  free(signal_stack);
  return NULL;
}

static void prepare_worker(Worker *w, Launch *launch) {
  w->launch = launch;
  w->last_buffer = 0;
  w->constant_page = 0;
  w->switches = w->simd_operations = w->barriers = w->threads = w->most_declared_bytes = 0;
  w->instructions = 0;
  memcpy(w->arguments, launch->arguments, launch->num_arguments * sizeof *w->arguments);
}

static void collect(Launch *launch, const Worker *w) {
  launch->num_threads += w->threads;
  launch->num_switches += w->switches;
  launch->num_simd_operations += w->simd_operations;
  launch->num_barriers += w->barriers;
  launch->num_instructions += w->instructions;
  if (w->most_declared_bytes > launch->threadgroup_bytes)
    launch->threadgroup_bytes = w->most_declared_bytes;
}

// ---- the dispatch --------------------------------------------------------------------------------

static int run(Launch *launch) {
  Dl_info info;
  module_base = dladdr(launch->entry, &info) ? (uintptr_t)info.dli_fbase : 0;
  num_groups = 1;
  for (int i = 0; i < 3; i++) num_groups *= divide_up(launch->grid[i], launch->threadgroup[i]);
  // Checks see one order of the threadgroups, so that a report can be repeated.
  uint32_t wanted = launch->check ? 1 : least(least(launch->workers, MAX_WORKERS),
                                              (uint32_t)(num_groups > MAX_WORKERS ? MAX_WORKERS
                                                                                  : num_groups));
  for (uint32_t i = 0; i < wanted; i++) {
    if (!workers[i] && !(workers[i] = create_worker())) return -1;
    prepare_worker(workers[i], launch);
  }
  atomic_store(&next_group, 0);
  install_handlers();
  pthread_t threads[MAX_WORKERS];
  uint32_t started = 1;
  while (started < wanted && !pthread_create(&threads[started], NULL, work, workers[started]))
    started++; // fewer threads than wanted still do all the work
  work(workers[0]);
  for (uint32_t i = 1; i < started; i++) pthread_join(threads[i], NULL);
  restore_handlers();
  for (uint32_t i = 0; i < started; i++) collect(launch, workers[i]);
  if (launch->check && !launch->num_faults) check_outputs(launch);
  return 0;
}

// 0: ran (look at num_faults); -1: no memory.
int msl_launch(Launch *launch) {
  pthread_mutex_lock(&launch_lock);
  faults_reset(launch);
  int result = check_prepare(launch) ? run(launch) : -1;
  check_release(launch);
  pthread_mutex_unlock(&launch_lock);
  return result;
}

// ---- what clang calls for __bf16 and old C libraries do not have --------------------------------

__bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  uint16_t result = is_nan ? (uint16_t)((bits >> 16) | 0x40) : rounded;
  __bf16 out;
  memcpy(&out, &result, sizeof out);
  return out;
}
