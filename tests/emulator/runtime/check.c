// Check mode: every load and store of the kernel lands here.
//
// The kernel is compiled with -fsanitize=thread and a few of -fsanitize=undefined; this file gives
// the callbacks their meaning in Metal's execution model. Threadgroup memory carries, per byte, who
// wrote and read it last and in which barrier epoch; writable buffers carry who wrote each byte.
#include "mslrt.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define CALLER __builtin_return_address(0)

enum { CONSTANT_PAGE = 4096 };
static const int64_t NEAR = 1ll << 28; // an access this close to a buffer is blamed on it

DeviceCell **device_cells;

// ---- life of the shadow memory ---------------------------------------------------------------

void check_reset(Worker *w) {
  memset(w->cells, 0, w->cells_used * sizeof *w->cells);
  w->cells_used = 0;
}

bool check_prepare(Launch *launch) {
  if (!launch->check) return true;
  device_cells = calloc(launch->num_buffers + 1, sizeof *device_cells);
  if (!device_cells) return false;
  for (uint32_t i = 0; i < launch->num_buffers; i++) {
    const Buffer *buffer = &launch->buffers[i];
    if (!buffer->writable) continue;
    device_cells[i] = calloc(buffer->size + 1, sizeof **device_cells);
    if (!device_cells[i]) return false;
    if (buffer->starts_unwritten) continue;
    for (uint64_t k = 0; k < buffer->size; k++) device_cells[i][k].group = INITIALISED;
  }
  return true;
}

void check_release(Launch *launch) {
  if (!device_cells) return;
  for (uint32_t i = 0; i < launch->num_buffers; i++) free(device_cells[i]);
  free(device_cells);
  device_cells = NULL;
}

// After a dispatch without other faults: every byte of an output must have been written.
void check_outputs(Launch *launch) {
  for (uint32_t i = 0; i < launch->num_buffers; i++) {
    const Buffer *buffer = &launch->buffers[i];
    if (!buffer->starts_unwritten || buffer->partly_written) continue;
    uint64_t missing = 0, first = 0;
    for (uint64_t k = 0; k < buffer->size; k++)
      if (!device_cells[i][k].group && !missing++) first = k;
    if (!missing) continue;
    launch->num_faults++;
    if (launch->num_kept < MAX_FAULTS)
      launch->faults[launch->num_kept++] = (FaultRecord){.kind = FAULT_UNWRITTEN_OUTPUT,
                                                         .buffer = (int32_t)i,
                                                         .offset = (int64_t)first,
                                                         .size = missing,
                                                         .extent = buffer->size};
  }
}

// ---- threadgroup memory ------------------------------------------------------------------------

static FaultRecord variable_fault(FaultKind kind, const ThreadgroupVariable *variable,
                                  int64_t offset, uint64_t size, Access access) {
  FaultRecord fault = fault_here(kind);
  fault.access = access;
  fault.offset = offset;
  fault.size = size;
  if (variable) {
    fault.extent = variable->size;
    strncpy(fault.name, variable->name, NAME_SIZE - 1);
  }
  return fault;
}

static bool holds(const ThreadgroupVariable *v, uint64_t offset, uint64_t size) {
  return v->size && offset >= v->offset && offset + size <= v->offset + v->size;
}

static const ThreadgroupVariable *find_variable(Worker *w, uint64_t offset, uint64_t size) {
  if (holds(&w->variables[w->last_variable], offset, size)) return &w->variables[w->last_variable];
  for (uint32_t i = 0; i < w->num_variables; i++) {
    if (!holds(&w->variables[i], offset, size)) continue;
    w->last_variable = i;
    return &w->variables[i];
  }
  return NULL;
}

static void outside_variables(Worker *w, uint64_t offset, uint64_t size, Access access, void *pc) {
  const ThreadgroupVariable *below = NULL; // the variable that starts last before the access
  for (uint32_t i = 0; i < w->num_variables; i++) {
    const ThreadgroupVariable *v = &w->variables[i];
    if (v->size && v->offset < offset + size && (!below || v->offset > below->offset)) below = v;
  }
  int64_t from = below ? (int64_t)offset - below->offset : 0;
  FaultRecord fault = variable_fault(FAULT_THREADGROUP_BOUNDS, below, from, size, access);
  fault_report(&fault, pc);
}

typedef struct {
  uint32_t epoch, thread, simdgroup;
  uint16_t simd_epoch;
} Moment; // when, in barriers, and by whom

// Is an earlier access by `thread` ordered before `now` by a barrier, or by being the same thread?
static bool ordered(Moment now, uint32_t epoch, uint32_t thread, uint16_t simd_epoch) {
  return epoch != now.epoch || thread == now.thread ||
         (thread / SIMD_WIDTH == now.simdgroup && simd_epoch != now.simd_epoch);
}

static bool read_is_ordered(Moment now, const ThreadgroupCell *cell) {
  if (cell->read_epoch != now.epoch) return true;
  if (cell->readers == 2) return false;
  if (cell->readers == 1)
    return cell->reader / SIMD_WIDTH == now.simdgroup && cell->reader_simd_epoch != now.simd_epoch;
  return ordered(now, cell->read_epoch, cell->reader, cell->reader_simd_epoch);
}

static void note_reader(Moment now, ThreadgroupCell *cell) {
  if (cell->read_epoch != now.epoch) cell->readers = 0;
  else if (cell->reader / SIMD_WIDTH != now.simdgroup) cell->readers = 2;
  else if (cell->readers < 2 && cell->reader_simd_epoch != now.simd_epoch) cell->readers = 0;
  else if (cell->readers < 2 && cell->reader != now.thread) cell->readers = 1;
  cell->read_epoch = now.epoch;
  cell->reader = (uint16_t)now.thread;
  cell->reader_simd_epoch = now.simd_epoch;
}

static void race(const ThreadgroupVariable *v, int64_t offset, uint64_t size, Access access,
                 Access other_access, uint32_t other, void *pc) {
  FaultRecord fault = variable_fault(FAULT_THREADGROUP_RACE, v, offset, size, access);
  fault.other_access = other_access;
  fault.other_thread = other;
  fault_report(&fault, pc);
}

static void threadgroup_byte(Moment now, ThreadgroupCell *cell, const ThreadgroupVariable *v,
                             int64_t offset, uint64_t size, Access access, void *pc) {
  if (access != ACCESS_WRITE && access != ACCESS_ATOMIC_STORE && !cell->written) {
    FaultRecord fault =
        variable_fault(FAULT_THREADGROUP_UNINITIALISED, v, offset, size, access);
    fault_report(&fault, pc);
    cell->written = 1; // reported once
  } else if (access <= ACCESS_WRITE && cell->written &&
             !ordered(now, cell->write_epoch, cell->writer, cell->writer_simd_epoch)) {
    race(v, offset, size, access, ACCESS_WRITE, cell->writer, pc);
  } else if (access == ACCESS_WRITE && !read_is_ordered(now, cell)) {
    race(v, offset, size, access, ACCESS_READ, cell->reader, pc);
  }
  if (access == ACCESS_READ) note_reader(now, cell);
  else cell->written = 1;
  if (access == ACCESS_WRITE) {
    cell->write_epoch = now.epoch;
    cell->writer = (uint16_t)now.thread;
    cell->writer_simd_epoch = now.simd_epoch;
  }
}

static void threadgroup_access(Worker *w, uint64_t offset, uint64_t size, Access access, void *pc) {
  const ThreadgroupVariable *v = find_variable(w, offset, size);
  if (!v) {
    outside_variables(w, offset, size, access, pc);
    return;
  }
  uint32_t simdgroup = w->fibers[w->current].simdgroup;
  Moment now = {w->threadgroup_epoch, w->current, simdgroup,
                (uint16_t)w->simdgroups[simdgroup].memory_epoch};
  for (uint64_t i = 0; i < size; i++)
    threadgroup_byte(now, &w->cells[offset + i], v, (int64_t)(offset + i - v->offset), size,
                     access, pc);
}

// ---- buffers -----------------------------------------------------------------------------------

static FaultRecord buffer_fault(FaultKind kind, Launch *launch, int32_t index, int64_t offset,
                                uint64_t size, Access access) {
  FaultRecord fault = fault_here(kind);
  fault.access = access;
  fault.buffer = index;
  fault.offset = offset;
  fault.size = size;
  fault.extent = index >= 0 ? launch->buffers[index].size : 0;
  return fault;
}

static int32_t find_buffer(const Launch *launch, uintptr_t address) {
  for (uint32_t i = 0; i < launch->num_buffers; i++)
    if (address - launch->buffers[i].address < launch->buffers[i].size) return (int32_t)i;
  return -1;
}

int32_t nearest_buffer(const Launch *launch, uintptr_t address) {
  int32_t nearest = -1;
  int64_t least = INT64_MAX;
  for (uint32_t i = 0; i < launch->num_buffers; i++) {
    int64_t from_start = (int64_t)(address - launch->buffers[i].address);
    int64_t past_end = from_start - (int64_t)launch->buffers[i].size;
    int64_t distance = from_start < 0 ? -from_start : past_end > 0 ? past_end : 0;
    if (distance < NEAR && distance < least) {
      least = distance;
      nearest = (int32_t)i;
    }
  }
  return nearest;
}

static _Noreturn void outside_buffers(Launch *launch, uintptr_t address, uint64_t size,
                                      Access access, void *pc) {
  int32_t nearest = nearest_buffer(launch, address);
  int64_t offset = (int64_t)(nearest < 0 ? address : address - launch->buffers[nearest].address);
  FaultRecord fault = buffer_fault(FAULT_DEVICE_BOUNDS, launch, nearest, offset, size, access);
  fault_report(&fault, pc);
  threadgroup_abandon();
}

// Constant tables live in the kernel's own library; thread ids and simdgroup slots in the worker.
static bool is_runtime_or_constant(Worker *w, uintptr_t address) {
  if (address - (uintptr_t)w < sizeof *w) return true;
  uintptr_t page = address & ~(uintptr_t)(CONSTANT_PAGE - 1);
  if (page == w->constant_page) return true;
  Dl_info info;
  if (!dladdr((void *)address, &info) || (uintptr_t)info.dli_fbase != module_base) return false;
  w->constant_page = page;
  return true;
}

static void device_byte(Worker *w, int32_t index, uint64_t offset, uint64_t size, Access access,
                        void *pc) {
  DeviceCell *cell = &device_cells[index][offset];
  uint32_t group = w->group + 1;
  uint16_t epoch = (uint16_t)w->device_epoch;
  bool stores = access == ACCESS_WRITE || access == ACCESS_ATOMIC_STORE;
  if (!stores && !cell->group) {
    FaultRecord fault = buffer_fault(FAULT_UNWRITTEN_READ, w->launch, index, (int64_t)offset, size,
                                     access);
    fault_report(&fault, pc);
    cell->group = INITIALISED; // reported once
  }
  if (access >= ACCESS_ATOMIC) {
    // Atomics never race with each other, so they do not take the byte from its last writer.
    if (!cell->group) *cell = (DeviceCell){group, (uint16_t)w->current, (uint16_t)(epoch - 1)};
    return;
  }
  bool by_other = cell->group && cell->group != INITIALISED &&
                  (cell->group != group || (cell->thread != w->current && cell->epoch == epoch));
  if (by_other) {
    FaultRecord fault = buffer_fault(FAULT_DEVICE_RACE, w->launch, index, (int64_t)offset, size,
                                     access);
    fault.other_access = ACCESS_WRITE;
    fault.other_group = cell->group - 1;
    fault.other_thread = cell->thread;
    fault_report(&fault, pc);
  }
  if (access == ACCESS_WRITE) *cell = (DeviceCell){group, (uint16_t)w->current, epoch};
}

static void device_access(Worker *w, uintptr_t address, uint64_t size, Access access, void *pc) {
  Launch *launch = w->launch;
  int32_t index = (int32_t)w->last_buffer;
  if (address - launch->buffers[index].address >= launch->buffers[index].size) {
    index = find_buffer(launch, address);
    if (index < 0 && is_runtime_or_constant(w, address)) return;
    if (index < 0) outside_buffers(launch, address, size, access, pc);
    w->last_buffer = (uint32_t)index;
  }
  const Buffer *buffer = &launch->buffers[index];
  uint64_t offset = address - buffer->address;
  if (offset + size > buffer->size) {
    FaultRecord fault = buffer_fault(FAULT_DEVICE_BOUNDS, launch, index, (int64_t)offset, size,
                                     access);
    fault_report(&fault, pc);
    threadgroup_abandon();
  }
  if (access != ACCESS_READ && !buffer->writable) {
    FaultRecord fault = buffer_fault(FAULT_READ_ONLY, launch, index, (int64_t)offset, size, access);
    fault_report(&fault, pc);
  }
  if (!device_cells[index]) return;
  for (uint64_t i = 0; i < size; i++) device_byte(w, index, offset + i, size, access, pc);
}

// ---- every access --------------------------------------------------------------------------------

static void note(const void *pointer, uint64_t size, Access access, void *pc) {
  Worker *w = worker;
  if (!w || !w->launch->check) return;
  uintptr_t address = (uintptr_t)pointer;
  if (address - (uintptr_t)w->arena < THREADGROUP_ARENA) {
    threadgroup_access(w, address - (uintptr_t)w->arena, size, access, pc);
    return;
  }
  uintptr_t in_stacks = address - (uintptr_t)w->stacks;
  if (in_stacks >= (uintptr_t)MAX_THREADS * STACK_SIZE) {
    device_access(w, address, size, access, pc);
    return;
  }
  uint32_t owner = (uint32_t)(in_stacks / STACK_SIZE);
  if (owner == w->current) return;
  FaultRecord fault = fault_here(FAULT_PRIVATE_MEMORY);
  fault.access = access;
  fault.other_thread = owner;
  fault_report(&fault, pc);
}

void __msl_note(const void *pointer, uint32_t size, int access) {
  note(pointer, size, (Access)access, CALLER);
}

// ---- callbacks of -fsanitize=thread ------------------------------------------------------------

void __tsan_init(void) {}
void __tsan_func_entry(void *pc) { (void)pc; }
void __tsan_func_exit(void) {}
void __tsan_vptr_read(void **p) { (void)p; }
void __tsan_vptr_update(void **p, void *v) { (void)p, (void)v; }

static void misaligned(const void *pointer, void *pc) {
  FaultRecord fault = fault_here(FAULT_ALIGNMENT);
  Launch *launch = worker->launch;
  fault.buffer = find_buffer(launch, (uintptr_t)pointer);
  fault.offset = (int64_t)(uintptr_t)pointer;
  if (fault.buffer >= 0) fault.offset -= (int64_t)launch->buffers[fault.buffer].address;
  fault_report(&fault, pc);
  threadgroup_abandon(); // some processors would stop at the access that follows
}

// clang calls these where the type promises alignment, and the unaligned_ ones where it does not.
static void note_aligned(const void *pointer, uint64_t size, Access access, void *pc) {
  if ((uintptr_t)pointer % size) misaligned(pointer, pc);
  note(pointer, size, access, pc);
}

#define ACCESSES(prefix, note, n)                                                  \
  void __tsan_##prefix##read##n(void *p) { note(p, n, ACCESS_READ, CALLER); }      \
  void __tsan_##prefix##write##n(void *p) { note(p, n, ACCESS_WRITE, CALLER); }    \
  void __tsan_##prefix##read_write##n(void *p) {                                   \
    note(p, n, ACCESS_READ, CALLER);                                               \
    note(p, n, ACCESS_WRITE, CALLER);                                              \
  }
#define SIZES(prefix, note)                                                        \
  ACCESSES(prefix, note, 1) ACCESSES(prefix, note, 2) ACCESSES(prefix, note, 4)    \
  ACCESSES(prefix, note, 8) ACCESSES(prefix, note, 16)
SIZES(, note_aligned)
SIZES(unaligned_, note)

void *__tsan_memcpy(void *to, const void *from, size_t size) {
  note(from, size, ACCESS_READ, CALLER);
  note(to, size, ACCESS_WRITE, CALLER);
  return memcpy(to, from, size);
}

void *__tsan_memmove(void *to, const void *from, size_t size) {
  note(from, size, ACCESS_READ, CALLER);
  note(to, size, ACCESS_WRITE, CALLER);
  return memmove(to, from, size);
}

void *__tsan_memset(void *to, int value, size_t size) {
  note(to, size, ACCESS_WRITE, CALLER);
  return memset(to, value, size);
}

// ---- callbacks of -fsanitize=array-bounds,alignment,shift,integer-divide-by-zero -----------------

void __ubsan_handle_out_of_bounds(void *place, uintptr_t index) {
  (void)place;
  FaultRecord fault = fault_here(FAULT_ARRAY_BOUNDS);
  fault.offset = (int64_t)index;
  fault_report(&fault, CALLER);
}

void __ubsan_handle_type_mismatch_v1(void *place, uintptr_t pointer) {
  (void)place;
  misaligned((void *)pointer, CALLER);
}

void __ubsan_handle_shift_out_of_bounds(void *place, uintptr_t left, uintptr_t right) {
  (void)place, (void)left, (void)right;
  FaultRecord fault = fault_here(FAULT_SHIFT);
  fault_report(&fault, CALLER);
}

void __ubsan_handle_divrem_overflow(void *place, uintptr_t left, uintptr_t right) {
  (void)place, (void)left, (void)right;
  FaultRecord fault = fault_here(FAULT_DIVISION);
  fault_report(&fault, CALLER);
  threadgroup_abandon();
}
