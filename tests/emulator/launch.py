"""One dispatch: buffers bound, the runtime called, its fault records turned into exceptions."""

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator.arrays import AnyArray
from tests.emulator.build import Built
from tests.emulator.errors import LaunchError
from tests.emulator.faults import (
    Evidence,
    Fault,
    FaultKind,
    KernelFault,
    MemoryAccess,
    SourceLine,
    describe,
)
from tests.emulator.symbols import locate
from tests.emulator.toolchain import runtime_library

MAX_THREADS = 1024  # per threadgroup
MAX_BUFFERS = 31
SIMD_WIDTH = 32
THREADGROUP_LIMIT = 32 << 10  # bytes

# From here to the next mark: the structures of runtime/mslrt.h, same fields, same order.
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
_NUM_ARGUMENTS, _FIRST_THREADGROUP_ARGUMENT, _MAX_THREADGROUP_ARGUMENTS = 40, 32, 4
_MAX_FAULTS, _MAX_SITES, _NAME_SIZE = 64, 4, 96
_NO_BUFFER = -1


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("address", _U64),
        ("size", _U64),
        ("writable", _U32),
        ("starts_unwritten", _U32),
        ("partly_written", _U32),
    )


class _FaultRecord(ctypes.Structure):
    _fields_ = (
        ("kind", _U32),
        ("access", _U32),
        ("group", _U32 * 3),
        ("thread", _U32 * 3),
        ("simdgroup", _U32),
        ("lane", _U32),
        ("has_thread", _U32),
        ("buffer", ctypes.c_int32),
        ("other_access", _U32),
        ("other_thread", _U32),
        ("other_group", _U32),
        ("waiting_simd", _U32),
        ("waiting_barrier", _U32),
        ("returned", _U32),
        ("repeats", _U32),
        ("num_sites", _U32),
        ("offset", ctypes.c_int64),
        ("size", _U64),
        ("extent", _U64),
        ("site", _U64),
        ("sites", _U64 * _MAX_SITES),
        ("name", ctypes.c_char * _NAME_SIZE),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(_U64)),
        ("num_arguments", _U32),
        ("num_buffers", _U32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("grid", _U32 * 3),
        ("threadgroup", _U32 * 3),
        ("check", _U32),
        ("workers", _U32),
        ("threadgroup_limit", _U32),
        ("num_threadgroup_arguments", _U32),
        ("threadgroup_argument_index", _U32 * _MAX_THREADGROUP_ARGUMENTS),
        ("threadgroup_argument_size", _U32 * _MAX_THREADGROUP_ARGUMENTS),
        ("faults", ctypes.POINTER(_FaultRecord)),
        ("num_faults", _U32),
        ("num_kept", _U32),
        ("num_threads", _U64),
        ("num_switches", _U64),
        ("num_simd_operations", _U64),
        ("num_barriers", _U64),
        ("threadgroup_bytes", _U64),
        ("num_instructions", _U64),
    )


# ---- what callers see -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Binding:
    """One buffer of a dispatch. A writable one receives what the kernel wrote."""

    index: int
    name: str
    array: AnyArray
    writable: bool = False
    starts_unwritten: bool = False  # an output without initial values
    partly_written: bool = False  # an output that may keep gaps


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of one dispatch; they say nothing about speed on a GPU."""

    num_threads: int
    num_switches: int
    num_simd_operations: int
    num_barriers: int
    threadgroup_bytes: int  # of threadgroup memory, the most any threadgroup declared
    num_instructions: float  # of simdgroups, in a build that counts them (counting.py)


@dataclass(frozen=True, slots=True)
class Size:
    """Threads of the grid and of one threadgroup, checked against Metal's limits."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    @classmethod
    def of(cls, grid: Sequence[int], threadgroup: Sequence[int]) -> "Size":
        for name, size in (("grid", grid), ("threadgroup", threadgroup)):
            if len(size) != 3 or any(extent < 1 for extent in size):
                raise LaunchError(f"{name}={tuple(size)}: three positive numbers are needed")
        # As MLX does: a threadgroup never exceeds the grid.
        x, y, z = (min(t, g) for t, g in zip(threadgroup, grid, strict=True))
        if x * y * z > MAX_THREADS:
            raise LaunchError(
                f"threadgroup={(x, y, z)} has {x * y * z} threads, the limit is {MAX_THREADS}"
            )
        return cls((grid[0], grid[1], grid[2]), (x, y, z))


class Program:
    """A built kernel, loaded."""

    def __init__(self, built: Built, check: bool) -> None:
        self._runtime = _load_runtime(runtime_library())
        self.kernel = built.kernel
        self._library = built.library
        self._check = check
        self._loaded = ctypes.CDLL(str(built.library))
        self._entry = ctypes.cast(self._loaded["__msl_entry"], ctypes.c_void_p)

    def dispatch(
        self,
        bindings: Sequence[Binding],
        size: Size,
        *,
        threadgroup_memory: Mapping[int, int],
        workers: int,
    ) -> Statistics:
        """Run the kernel. Raises LaunchError before, KernelFault after it broke a rule."""
        self._require_bindings(bindings)
        launch = _Launch(entry=self._entry, num_arguments=_NUM_ARGUMENTS)
        launch.grid, launch.threadgroup = (_U32 * 3)(*size.grid), (_U32 * 3)(*size.threadgroup)
        launch.check, launch.workers = int(self._check), max(1, workers)
        launch.threadgroup_limit = THREADGROUP_LIMIT
        _set_threadgroup_memory(launch, threadgroup_memory)
        records = (_FaultRecord * _MAX_FAULTS)()
        launch.faults = records
        guarded = _GuardedBuffers(self._runtime, bindings)
        try:
            launch.arguments, launch.buffers = guarded.arguments, guarded.buffers
            launch.num_buffers = len(bindings)
            if self._runtime.msl_launch(ctypes.byref(launch)) != 0:
                raise MemoryError("no memory for the threads of the emulator")
            if launch.num_faults:
                raise self._fault(launch, records, bindings)
            guarded.copy_back()
        finally:
            guarded.release()
        return _statistics(launch)

    def _require_bindings(self, bindings: Sequence[Binding]) -> None:
        bound = {binding.index for binding in bindings}
        names = self.kernel.buffer_names()
        for index, name in names.items():
            if index not in bound and name not in self.kernel.optional:
                raise LaunchError(f"{self.kernel.name}: buffer {index} ('{name}') is not bound")
        for index in bound:
            if not 0 <= index < MAX_BUFFERS:
                raise LaunchError(f"{self.kernel.name}: buffer index {index} is not in 0..30")

    def _fault(
        self, launch: _Launch, records: ctypes.Array[_FaultRecord], bindings: Sequence[Binding]
    ) -> KernelFault:
        faults = [self._describe(records[k], bindings) for k in range(launch.num_kept)]
        return KernelFault(self.kernel.name, faults, launch.num_faults)

    def _describe(self, record: Any, bindings: Sequence[Binding]) -> Fault:
        kind = FaultKind(record.kind)
        name = record.name.decode(errors="replace") or None
        if record.buffer != _NO_BUFFER:
            name = bindings[record.buffer].name
        evidence = Evidence(
            access=MemoryAccess(record.access),
            name=name,
            offset=record.offset,
            size=record.size,
            extent=record.extent,
            other_access=MemoryAccess(record.other_access),
            other_thread=record.other_thread,
            other_group=record.other_group,
            waiting_simd=record.waiting_simd,
            waiting_barrier=record.waiting_barrier,
            returned=record.returned,
            waiting_at=self._places(record.sites[: record.num_sites]),
        )
        has_thread = bool(record.has_thread)
        return Fault(
            kind=kind,
            message=describe(kind, evidence),
            place=locate(self._library, record.site) if record.site else None,
            buffer=None if kind is FaultKind.MISUSE else name,
            offset=record.offset,
            threadgroup=tuple(record.group) if has_thread else None,
            thread=tuple(record.thread) if has_thread else None,
            simdgroup=record.simdgroup,
            lane=record.lane,
            repeats=record.repeats,
        )

    def _places(self, sites: Sequence[int]) -> tuple[SourceLine, ...]:
        places = (locate(self._library, site) for site in sites)
        return tuple(dict.fromkeys(place for place in places if place is not None))


class _GuardedBuffers:
    """Copies of the bound arrays, each between unreadable pages."""

    def __init__(self, runtime: ctypes.CDLL, bindings: Sequence[Binding]) -> None:
        self._runtime = runtime
        self.arguments = (_U64 * _NUM_ARGUMENTS)()
        self.buffers = (_Buffer * max(1, len(bindings)))()
        self._copies: list[tuple[int, int]] = []  # what to release
        self._written: list[tuple[int, int, int]] = []  # target, source, bytes
        for k, binding in enumerate(bindings):
            self._add(k, binding)

    def _add(self, k: int, binding: Binding) -> None:
        low, high = np.lib.array_utils.byte_bounds(binding.array)
        size = high - low if binding.array.size else 0
        base, total = ctypes.c_void_p(), _U64()
        copy = self._runtime.msl_guard_allocate(size, ctypes.byref(base), ctypes.byref(total))
        if copy is None or base.value is None:
            self.release()
            raise MemoryError(f"no address space for a guarded copy of '{binding.name}'")
        self._copies.append((base.value, total.value))
        ctypes.memmove(copy, low, size)
        if binding.writable:
            self._written.append((low, copy, size))
        # A strided array is passed by its first element, which need not be its lowest.
        self.arguments[binding.index] = copy + (binding.array.ctypes.data - low)
        flags = binding.writable, binding.starts_unwritten, binding.partly_written
        self.buffers[k] = _Buffer(copy, size, *flags)

    def copy_back(self) -> None:
        for target, source, size in self._written:
            ctypes.memmove(target, source, size)

    def release(self) -> None:
        for base, total in self._copies:
            self._runtime.msl_guard_release(base, total)
        self._copies.clear()


def _set_threadgroup_memory(launch: _Launch, sizes: Mapping[int, int]) -> None:
    if len(sizes) > _MAX_THREADGROUP_ARGUMENTS:
        raise LaunchError(f"more than {_MAX_THREADGROUP_ARGUMENTS} threadgroup arguments")
    if sum(math.ceil(size / 16) * 16 for size in sizes.values()) > THREADGROUP_LIMIT:
        raise LaunchError(f"threadgroup arguments pass the limit of {THREADGROUP_LIMIT} bytes")
    for n, (index, size) in enumerate(sizes.items()):
        launch.threadgroup_argument_index[n] = _FIRST_THREADGROUP_ARGUMENT + index
        launch.threadgroup_argument_size[n] = size
    launch.num_threadgroup_arguments = len(sizes)


def _statistics(launch: _Launch) -> Statistics:
    return Statistics(
        launch.num_threads,
        launch.num_switches,
        launch.num_simd_operations,
        launch.num_barriers,
        launch.threadgroup_bytes,
        launch.num_instructions / SIMD_WIDTH,
    )


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(path))
    runtime.msl_guard_allocate.restype = ctypes.c_void_p
    runtime.msl_guard_allocate.argtypes = [
        _U64,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(_U64),
    ]
    runtime.msl_guard_release.argtypes = [ctypes.c_void_p, _U64]
    runtime.msl_record_size.restype = runtime.msl_launch_size.restype = _U64
    sizes = runtime.msl_record_size(), runtime.msl_launch_size()
    assert sizes == (ctypes.sizeof(_FaultRecord), ctypes.sizeof(_Launch)), sizes
    return runtime
