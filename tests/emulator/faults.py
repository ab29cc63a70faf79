"""What a kernel did wrong while it ran, in words.

The runtime records numbers (FaultRecord in runtime/mslrt.h); this file knows what they mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tests.emulator.errors import EmulatorError


class FaultKind(IntEnum):
    """Which rule was broken; the values are those of FaultKind in mslrt.h."""

    DIVERGENCE = 1
    THREADGROUP_LIMIT = 2
    MISUSE = 3
    THREADGROUP_BOUNDS = 4
    THREADGROUP_UNINITIALISED = 5
    THREADGROUP_RACE = 6
    PRIVATE_MEMORY = 7
    DEVICE_BOUNDS = 8
    READ_ONLY = 9
    DEVICE_RACE = 10
    UNWRITTEN_READ = 11
    UNWRITTEN_OUTPUT = 12
    ARRAY_BOUNDS = 13
    ALIGNMENT = 14
    SHIFT = 15
    DIVISION = 16
    MEMORY = 17
    STACK = 18


class MemoryAccess(IntEnum):
    """What a thread did to memory; the values are those of Access in mslrt.h."""

    READ = 0
    WRITE = 1
    ATOMIC = 2
    ATOMIC_STORE = 3

    def __str__(self) -> str:
        return "write" if self in (MemoryAccess.WRITE, MemoryAccess.ATOMIC_STORE) else "read"


Position = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the Metal text. `file` is the kernel's name, or the path of an include."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule, at one place of the kernel. None: not known, or it does not apply."""

    kind: FaultKind
    message: str
    place: SourceLine | None
    buffer: str | None  # the buffer's, or the threadgroup variable's, name
    offset: int  # in bytes from the start of the buffer
    threadgroup: Position | None
    thread: Position | None  # in its threadgroup
    simdgroup: int
    lane: int
    repeats: int  # more faults of the same kind at the same place

    def __str__(self) -> str:
        parts = [f"{self.place}: {self.message}" if self.place else self.message]
        if self.thread is not None and self.threadgroup is not None:
            parts.append(
                f"threadgroup {_position(self.threadgroup)} thread {_position(self.thread)} "
                f"simdgroup {self.simdgroup} lane {self.lane}"
            )
        if self.repeats:
            parts.append(f"and {self.repeats} more like it")
        return " | ".join(parts)


class KernelFault(EmulatorError):
    """The kernel broke a rule of Metal's execution model; `faults` holds each distinct case."""

    def __init__(self, kernel: str, faults: Sequence[Fault], num_faults: int) -> None:
        self.kernel = kernel
        self.faults = tuple(faults)
        self.num_faults = num_faults
        lines = "\n".join(f"  {fault}" for fault in faults)
        count = "1 fault" if num_faults == 1 else f"{num_faults} faults"
        super().__init__(f"{kernel}: {count}\n{lines}")


def _position(position: Position) -> str:
    return f"({', '.join(map(str, position))})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The numbers a message is made of; see FaultRecord in mslrt.h."""

    access: MemoryAccess
    name: str | None  # buffer or threadgroup variable, or the message of a misuse
    offset: int
    size: int
    extent: int
    other_access: MemoryAccess
    other_thread: int
    other_group: int
    waiting_simd: int
    waiting_barrier: int
    returned: int
    waiting_at: tuple[SourceLine, ...]


def describe(kind: FaultKind, e: Evidence) -> str:
    """What went wrong, in one sentence."""
    of = f"'{e.name}'" if e.name else "an unknown buffer"
    byte = f"byte {e.offset} of {of}"
    match kind:
        case FaultKind.DIVERGENCE:
            return _divergence(e)
        case FaultKind.THREADGROUP_LIMIT:
            return f"threadgroup memory: {e.size} bytes with variable {of}, the limit is {e.extent}"
        case FaultKind.MISUSE:
            return e.name or "misuse"
        case FaultKind.THREADGROUP_BOUNDS:
            return f"out-of-bounds threadgroup {e.access} of {e.size} bytes at {byte} ({e.extent} bytes)"
        case FaultKind.THREADGROUP_UNINITIALISED:
            return f"read of uninitialised threadgroup memory, {byte}"
        case FaultKind.THREADGROUP_RACE:
            return (
                f"threadgroup data race: {e.access} of {byte} with no barrier after "
                f"the {e.other_access} by thread {e.other_thread}"
            )
        case FaultKind.PRIVATE_MEMORY:
            return f"{e.access} of the private memory of thread {e.other_thread}"
        case FaultKind.DEVICE_BOUNDS:
            return f"out-of-bounds device {e.access} of {e.size} bytes at {byte} ({e.extent} bytes)"
        case FaultKind.READ_ONLY:
            return f"write to the read-only input {of}, byte {e.offset}"
        case FaultKind.DEVICE_RACE:
            return (
                f"device data race: {e.access} of {byte}, also written by "
                f"threadgroup {e.other_group} thread {e.other_thread}"
            )
        case FaultKind.UNWRITTEN_READ:
            return f"read of the output {of} before anything was written, byte {e.offset}"
        case FaultKind.UNWRITTEN_OUTPUT:
            return (
                f"output {of}: {e.size} of {e.extent} bytes never written (first: byte {e.offset})"
            )
        case FaultKind.ARRAY_BOUNDS:
            return f"array index {e.offset} out of bounds"
        case FaultKind.ALIGNMENT:
            return f"misaligned access at {byte}"
        case FaultKind.SHIFT:
            return "shift by a negative amount or by the width of the type"
        case FaultKind.DIVISION:
            return "integer division by zero"
        case FaultKind.MEMORY:
            return f"memory fault at {byte} ({e.extent} bytes), or a misaligned vector access"
        case FaultKind.STACK:
            return "private memory overflow: more than 256 KB of local variables in one thread"


def _divergence(e: Evidence) -> str:
    places = ", ".join(str(place) for place in e.waiting_at)
    return (
        f"divergent synchronisation: {e.waiting_simd} threads wait in simdgroup functions, "
        f"{e.waiting_barrier} at threadgroup_barrier, {e.returned} have returned"
        + (f"; they wait at {places}" if places else "")
    )
