// libmslrt: runs one Metal-style compute dispatch on a CPU.
//
// Every thread of a threadgroup is a fiber (fiber.c) on one OS thread. Barriers and simdgroup
// functions are rendezvous points (schedule.c). Threadgroups are handed out to worker threads
// (launch.c). In check mode the kernel is compiled with clang's sanitizer instrumentation, whose
// callbacks land in check.c; no sanitizer runtime is linked. What goes wrong is recorded by fault.c
// and given its words in ../faults.py.
//
// Plain C on purpose: the pip-only compiler (zig) would first build a C++ library, for minutes.
#pragma once

#if !defined(_GNU_SOURCE) && !defined(__APPLE__)
#define _GNU_SOURCE // dladdr, sigjmp_buf, REG_RIP
#endif

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  MAX_THREADS = 1024,            // per threadgroup, the Metal limit
  SIMD_WIDTH = 32,
  MAX_SIMDGROUPS = MAX_THREADS / SIMD_WIDTH,
  SLOT_SIZE = 64,                // bytes one lane can publish; __slots in msl_prefix.h knows it
  THREADGROUP_ARENA = 128 << 10, // more than the 32 KB limit: red zones between variables
  RED_ZONE = 256,
  STACK_SIZE = 256 << 10,
  MAX_VARIABLES = 256,           // threadgroup variables; the last few are threadgroup arguments
  MAX_THREADGROUP_ARGUMENTS = 4,
  MAX_ARGUMENTS = 40,            // 32 buffers, then the threadgroup arguments
  MAX_FAULTS = 64,               // distinct faults kept per launch
  MAX_SITES = 4,
  NAME_SIZE = 96,
};

// Must match FaultKind in ../faults.py.
typedef enum {
  FAULT_DIVERGENCE = 1,
  FAULT_THREADGROUP_LIMIT,
  FAULT_MISUSE,
  FAULT_THREADGROUP_BOUNDS,
  FAULT_THREADGROUP_UNINITIALISED,
  FAULT_THREADGROUP_RACE,
  FAULT_PRIVATE_MEMORY,
  FAULT_DEVICE_BOUNDS,
  FAULT_READ_ONLY,
  FAULT_DEVICE_RACE,
  FAULT_UNWRITTEN_READ,
  FAULT_UNWRITTEN_OUTPUT,
  FAULT_ARRAY_BOUNDS,
  FAULT_ALIGNMENT,
  FAULT_SHIFT,
  FAULT_DIVISION,
  FAULT_MEMORY,
  FAULT_STACK,
} FaultKind;

// Must match Access in ../faults.py and the callers of __msl_note in msl_prefix.h.
typedef enum { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC, ACCESS_ATOMIC_STORE } Access;

enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 }; // bits of metal::mem_flags

// ---- shared with ../launch.py: same fields, same order ---------------------------------------

typedef struct {
  uint64_t address, size;
  uint32_t writable;
  uint32_t starts_unwritten; // an output without init_value: nothing may read it before a write
  uint32_t partly_written;   // and some of it may stay unwritten
} Buffer;

typedef struct {
  uint32_t kind, access;
  uint32_t group[3], thread[3], simdgroup, lane;
  uint32_t has_thread;                             // 0: the fault belongs to the whole dispatch
  int32_t buffer;                                  // index into Launch.buffers, or -1
  uint32_t other_access, other_thread, other_group;
  uint32_t waiting_simd, waiting_barrier, returned; // of a divergence
  uint32_t repeats, num_sites;
  int64_t offset;                                  // bytes from the start of the buffer or variable
  uint64_t size, extent;                           // bytes touched; bytes the buffer or variable has
  uint64_t site;                                   // code address in the kernel's library, or 0
  uint64_t sites[MAX_SITES];                       // where the others wait
  char name[NAME_SIZE];                            // threadgroup variable, or a message
} FaultRecord;

typedef struct {
  void *entry;
  uint64_t *arguments;
  uint32_t num_arguments, num_buffers;
  Buffer *buffers;
  uint32_t grid[3], threadgroup[3]; // in threads
  uint32_t check, workers;
  uint32_t threadgroup_limit, num_threadgroup_arguments;
  uint32_t threadgroup_argument_index[MAX_THREADGROUP_ARGUMENTS];
  uint32_t threadgroup_argument_size[MAX_THREADGROUP_ARGUMENTS];
  FaultRecord *faults;
  uint32_t num_faults, num_kept; // all of them; the distinct ones that were kept
  uint64_t num_threads, num_switches, num_simd_operations, num_barriers;
  uint64_t threadgroup_bytes;    // the most any threadgroup declared
  uint64_t num_instructions;     // of all threads, in a build that counts them
} Launch;

// ---- the kernel's view of a thread: must match __msl_tid in msl_prefix.h ----------------------

typedef struct {
  uint32_t position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint32_t threads_per_threadgroup[3], threadgroups_per_grid[3], threads_per_grid[3];
  uint32_t dispatch_threads_per_threadgroup[3], grid_origin[3];
  uint32_t index_in_threadgroup, simdgroup_index, lane, simdgroups, dispatch_simdgroups;
  uint32_t threads_per_simdgroup, execution_width;
  uint32_t quadgroup_index, lane_in_quadgroup, quadgroups, dispatch_quadgroups;
} ThreadIds;

typedef void (*KernelEntry)(uint64_t *arguments, const ThreadIds *ids);

// ---- state of one worker ---------------------------------------------------------------------

typedef struct {
  uint32_t num_lanes;
  uint32_t ready, at_simd, at_barrier, done; // lane masks
  uint32_t generation;                       // simdgroup rendezvous completed
  uint32_t memory_epoch;                     // simdgroup_barrier(mem_threadgroup) completed
  void *site;                                // the place of this rendezvous' first arrival
  uint32_t lanes_released[2];                // who took part, by parity of the generation
  bool released_by_return;                   // no lane was the last: the first to resume takes its place
  // One slot per lane and one for the reduction's result. Two sets, because a lane may publish for
  // the next rendezvous before another has read this one.
  _Alignas(64) uint8_t slots[2][SLOT_SIZE * (SIMD_WIDTH + 1)];
} Simdgroup;

typedef struct {
  void *stack_pointer;
  ThreadIds ids;
  uint32_t simdgroup, lane;
  void *site; // where it waits
} Fiber;

// What is known about one byte of threadgroup memory.
typedef struct {
  uint32_t write_epoch, read_epoch;
  uint16_t writer, reader;
  uint16_t writer_simd_epoch, reader_simd_epoch;
  uint8_t written;
  uint8_t readers; // this epoch: 0 one thread, 1 several of one simdgroup, 2 several simdgroups
} ThreadgroupCell;

// What is known about one byte of a writable buffer.
typedef struct {
  uint32_t group; // 1 + index of the threadgroup that wrote it; 0 none; INITIALISED
  uint16_t thread, epoch;
} DeviceCell;
#define INITIALISED UINT32_MAX // held a value before the dispatch

typedef struct {
  uint32_t offset, size;
  const char *name;
} ThreadgroupVariable;

typedef struct {
  Launch *launch;
  void *main_stack_pointer;
  uint32_t num_threads, num_simdgroups, num_done, num_at_barrier;
  uint32_t current; // index of the running fiber
  uint32_t threadgroup_epoch, device_epoch;
  void *barrier_site;
  uint32_t group, group_position[3];
  uint32_t arena_used, declared_bytes, num_variables;
  uint32_t last_buffer, last_variable; // where the previous access landed
  uintptr_t constant_page;             // a page known to hold the kernel's constants
  uint64_t switches, simd_operations, barriers, threads, instructions;
  uint64_t most_declared_bytes;
  char *stacks, *arena;
  ThreadgroupCell *cells; // check mode: one per byte of the arena
  uint32_t cells_used;    // how many of them may hold history, of this launch or an earlier one
  bool can_recover;
  sigjmp_buf recover;
  uint64_t arguments[MAX_ARGUMENTS];
  ThreadgroupVariable variables[MAX_VARIABLES];
  Simdgroup simdgroups[MAX_SIMDGROUPS];
  Fiber fibers[MAX_THREADS];
} Worker;

extern _Thread_local Worker *worker;
extern DeviceCell **device_cells; // check mode: per buffer, NULL where nothing may be written
extern uintptr_t module_base;     // load address of the kernel's library

// fiber.c
void msl_switch(void **save, void *to);
void *fiber_prepare(char *stack_top, void (*function)(void));

// schedule.c
void fiber_main(void);

// fault.c
void faults_reset(Launch *launch);
bool faults_stopped(void);
void faults_stop(void);
FaultRecord fault_here(FaultKind kind);        // a record that names the running thread
void fault_report(FaultRecord *fault, void *return_address);
_Noreturn void threadgroup_abandon(void);      // leave the kernel; the launch stops

// check.c
void check_reset(Worker *w);
bool check_prepare(Launch *launch);
void check_outputs(Launch *launch);
void check_release(Launch *launch);
