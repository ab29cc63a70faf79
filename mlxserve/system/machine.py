"""The machine: its properties, and settings that must precede the import of mlx.

Importing this module imports only the standard library and has no side effects. Whoever is about to
import mlx for the first time in a process (a command, `LLM`, the tests' conftest) calls
`prepare()`, and before it builds an engine `import_mlx_lm()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import os
import platform
import random
import re
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxserve.core.errors import OutOfMemory
from mlxserve.system.blas import Blas, is_mlx_imported, load_blas
from mlxserve.system.deferred_packages import defer_packages
from mlxserve.system.device_memory import DeviceMemory
from mlxserve.system.memory_groups import group_limits

# How many operations a Metal command buffer may have, and how many million elements its inputs ("MB" in the
# name of the variable). With MLX's own 20 to 50 a step of decodes is cut into dozens: another project measured
# 58 -> 91 tokens/s when it was not; unmeasured by us. With these one of 32B has 5. Elements are those of the
# weights, as of pools only a page counts (metal_kernels/first_page.py). A user's own settings win.
COMMAND_BUFFER_LIMITS = {"MLX_MAX_OPS_PER_BUFFER": 300, "MLX_MAX_MB_PER_BUFFER": 1280}

# glibc's malloc, from which mlx's CPU backend takes every array, returns large freed blocks to the
# kernel at once, and the next operation's result comes page by page, zeroed: an addition over 12 MB
# takes 11 ms that way and 2 ms in memory that was kept, attention of 512 rows over 512 positions 100
# and 48 ms (2-core x86, one thread). Numbers from malloc.h and the bytes we set them to: blocks below
# the first are reused (32 MiB is the most glibc allows), freed memory is kept up to the second.
_MALLOC_OPTIONS = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 256 << 20)}

# macOS starts processes with 256, fewer than the connections that a server accepts.
_OPEN_FILES = 4_096

PRESSURE_FILE = Path("/proc/pressure/memory")
_STALLED = (20.0, 50.0)  # percent of the time: short of memory, and worse

# Bytes of addresses without which MKL ends the process while it is loaded, and without which mlx
# crashes in its first steps, because its CPU allocator does not check what malloc returns.
_MIN_TO_LOAD = 1 << 30
_MIN_TO_COMPUTE = 256 << 20
# Below those that systems give to connections and to who asks for any: 32,768 on Linux, 49,152 on macOS.
_PORTS = range(20_000, 32_000)


@functools.cache
def prepare() -> Blas:
    """Set MLX's defaults and load a BLAS, once per process, before mlx is imported.

    Raises what `load_blas` raises, and OutOfMemory if the address space may be too small to load
    anything.
    """
    for name, number in COMMAND_BUFFER_LIMITS.items():
        os.environ.setdefault(name, str(number))
    if sys.platform == "darwin":
        return Blas("Accelerate", None, is_fast=True)
    if (space := address_space()) is not None and not is_mlx_imported():
        _left_of(space, _MIN_TO_LOAD)
    keep_freed_memory()
    return load_blas()


def allow_open_files() -> int:
    """Raise the limit of open files to 4,096, as far as the hard limit allows. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def import_mlx_lm() -> None:
    """Import mlx-lm's loader, without all of mlx-lm and transformers.

    The limit of open files stays: `mlx_lm.utils` calls `setrlimit(RLIMIT_NOFILE, (2048, 4096))`
    when it is imported. That fails where the hard limit is lower, and lowers a higher one for good.
    It offers no way to prevent it.
    """
    prepare()
    allow_open_files()
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # mlx-lm's __init__ does so
    defer_packages()
    with _ignoring_limits():
        importlib.import_module("mlx_lm.utils")


@contextlib.contextmanager
def _ignoring_limits() -> Iterator[None]:
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory. False if the C library is not glibc."""
    mallopt = getattr(ctypes.PyDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(number, value) == 1 for number, value in _MALLOC_OPTIONS.values())


def memory() -> DeviceMemory:
    """Return this machine's memory as the device reports it. Imports mlx.

    Raises OutOfMemory if the address space may be too small to compute anything.
    """
    prepare()

    total = total_memory()
    if (space := address_space()) is not None:
        total = min(total, _left_of(space, _MIN_TO_COMPUTE))
    if is_metal():
        return DeviceMemory(total, working_set(), wired_at_start(), is_metal=True)
    # A CPU has no such recommendation, and shares its memory with everything else: a quarter.
    return DeviceMemory(total, total // 4)


@functools.cache
def total_memory() -> int:
    """Bytes that this process may have resident: the machine's, or its control groups' limit."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *group_limits()])


def memory_used() -> float:
    """Share of its memory that this process uses, 0 to 1: that of the scarcest kind."""
    import mlx.core as mx
    import psutil

    shares = [psutil.Process().memory_info().rss / total_memory()]
    if (space := address_space()) is not None:
        shares.append(space.used / space.limit)
    if is_metal():
        shares.append(memory().share(mx.get_active_memory() + mx.get_cache_memory()))
    return max(shares)


def memory_pressure() -> int:
    """The system's memory pressure: 0 none, 1 short, 2 stalling or killing.

    On macOS the kernel's own level. On Linux the share of the last ten seconds in which all
    processes waited for memory; 0 if the kernel does not report it.
    """
    if sys.platform == "darwin":
        return {2: 1, 4: 2}.get(system_number("kern.memorystatus_vm_pressure_level"), 0)
    try:
        text = PRESSURE_FILE.read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(r"^full avg10=([\d.]+)", text, re.MULTILINE)
    share = float(match[1]) if match else 0.0
    return sum(share >= mark for mark in _STALLED)


def system_number(name: str) -> int:
    """Read a number of macOS's kernel by sysctl; 0 if it has none."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    sysctl = ctypes.CDLL(None).sysctlbyname
    failed = sysctl(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def return_free_memory() -> None:
    """Release the caches of mlx and malloc. Call it on the thread that computes."""
    import mlx.core as mx

    mx.clear_cache()
    trim = getattr(ctypes.PyDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@functools.cache
def wired_at_start() -> int:
    """Bytes that macOS could not take back from any program at the first call.

    The first call comes before a model is loaded, so these are the kernel's, and what other model
    servers keep resident.
    """
    if sys.platform != "darwin":
        return 0
    import psutil

    return int(psutil.virtual_memory().wired)


@functools.cache
def working_set() -> int:
    """Bytes that macOS recommends for the GPU, which it may also keep resident.

    A raised `iogpu.wired_limit_mb` is part of it. mlx asks once, so a process keeps the value that
    it started with.
    """
    import mlx.core as mx

    return int(mx.device_info()["max_recommended_working_set_size"])


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """Used and allowed bytes of this process's address space (`ulimit -v`)."""

    used: int
    limit: int


def address_space() -> AddressSpace | None:
    """Return the address space; None if unlimited or unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        # Not Linux: macOS does not enforce this limit.
        return None
    if limit == resource.RLIM_INFINITY:
        return None
    return AddressSpace(pages * os.sysconf("SC_PAGE_SIZE"), limit)


def _left_of(space: AddressSpace, minimum: int) -> int:
    """Raises OutOfMemory if fewer than `least` bytes are left."""
    left = space.limit - space.used
    if left < minimum:
        gib = 1 << 30
        raise OutOfMemory(
            f"this process may have {space.limit / gib:.2f} GiB of addresses and has "
            f"{space.used / gib:.2f} GiB before the model is loaded. Raise the limit (ulimit -v)."
        )
    return left


def is_metal() -> bool:
    """True if mlx computes on Metal. Imports mlx."""
    prepare()
    import mlx.core as mx

    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def facts() -> dict[str, str]:
    """Facts for a report about this machine, in reading order. Imports mlx."""
    blas = prepare()
    import mlx.core as mx

    sizes = memory()
    lines = {
        "mlxserve": _version("mlxserve"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "memory": _memory_label(sizes),
        "mlx": _version("mlx"),
        "mlx-lm": _version("mlx-lm"),
        "device": "Metal" if is_metal() else "CPU",
        "blas": blas.name if blas.path is None else f"{blas.name} ({blas.path})",
    }
    if is_metal():
        info = mx.device_info()
        lines["gpu"] = _gpu_label(str(info.get("device_name", "unknown")))
    return lines


def _gpu_label(name: str) -> str:
    """A hosted Mac's GPU is a virtual one: it runs Metal, as fast as its host has time."""
    return f"{name}, virtual: its speeds are no Mac's" if "Paravirtual" in name else name


def _memory_label(sizes: DeviceMemory) -> str:
    gib = 1 << 30
    of_models = sizes.limit().nbytes / gib
    taken = f", {sizes.taken / gib:.1f} GiB wired by other programs" if sizes.taken else ""
    return (
        f"{sizes.total / gib:.1f} GiB, working set {sizes.working_set / gib:.1f} GiB{taken}: "
        f"{of_models:.1f} GiB for models"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def free_ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1, for processes that listen once they have a model.

    Until then no other process gets one of them, unless it asks for that very port. Raises OSError.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"Of the ports {_PORTS.start} to {_PORTS.stop - 1} fewer than {count} are free.")
