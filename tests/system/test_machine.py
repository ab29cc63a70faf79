"""prepare() sets what mlx needs before it is imported; and what is known of the machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.system import machine
from mlxserve.system.blas import Blas, SlowBlasWarning


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Blas]:
    """prepare() as if for the first time in a process, with a BLAS that only says that it is one."""
    monkeypatch.setattr(machine, "load_blas", lambda: Blas("MKL", "/b/mkl", is_fast=True))
    return machine.prepare.__wrapped__


def test_a_mac_needs_no_library(
    prepare: Callable[[], Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert prepare() == Blas("Accelerate", None, is_fast=True)


def test_elsewhere_a_library_is_loaded(
    prepare: Callable[[], Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert prepare() == Blas("MKL", "/b/mkl", is_fast=True)


def test_mlx_gets_its_defaults_but_keeps_what_the_user_set(
    prepare: Callable[[], Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "removed in the next line, restored at the end")
    del os.environ["MLX_MAX_MB_PER_BUFFER"]
    prepare()
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    assert os.environ["MLX_MAX_MB_PER_BUFFER"] == "1280"


@pytest.mark.parametrize("of_the_user", [None, "0", "1"])
def test_how_a_gpu_hands_over_to_the_cpu_is_left_to_the_user(
    of_the_user: str | None, prepare: Callable[[], Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another project saw stale data with MLX_METAL_FAST_SYNCH."""
    monkeypatch.setattr(sys, "platform", "darwin")
    name = "MLX_METAL_FAST_SYNCH"
    monkeypatch.setenv(name, of_the_user or "")
    if of_the_user is None:
        del os.environ[name]
    prepare()
    assert os.environ.get(name) == of_the_user


# ---- what the machine is


def test_memory_to_plan_with_is_part_of_what_there_is() -> None:
    found = machine.memory()
    assert 0 < found.working_set <= found.total


def test_a_cpu_plans_with_a_quarter(on_a_cpu: None) -> None:
    assert machine.memory().working_set == machine.memory().total // 4


def test_facts_are_sentences_for_a_report() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowBlasWarning)
        facts: dict[str, Any] = machine.facts()
    assert {"mlxserve", "python", "system", "memory", "mlx", "device", "blas"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
    assert facts["device"] == ("Metal" if machine.is_metal() else "CPU")


@pytest.mark.usefixtures("on_metal")
def test_a_virtual_gpu_is_named_and_its_speeds_are_not_a_macs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtual = "Apple Paravirtual device"
    for name, label in {
        virtual: f"{virtual}, virtual: its speeds are no Mac's",
        "Apple M4 Pro": "Apple M4 Pro",
    }.items():
        monkeypatch.setattr(mx, "device_info", lambda name=name: {"device_name": name})
        assert machine.facts()["gpu"] == label


# ---- freed memory

# Page faults of writing 16 MB again and again, in a process whose malloc was asked to keep memory.
_PAGE_FAULTS = """
import ctypes, resource, sys
from mlxserve.system.machine import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.PyDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = libc.memset.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def write():
    block = libc.malloc(16 << 20)
    libc.memset(block, 1, 16 << 20)
    libc.free(block)
write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    write()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", _PAGE_FAULTS, how], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_memory_that_was_freed_is_not_fetched_from_the_kernel_again() -> None:
    assert faults("kept") < 100 < faults("given back")


def test_free_ports_are_different_and_nothing_listens_on_them() -> None:
    ports = machine.free_ports(50)
    assert len(set(ports)) == 50
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_too_few_free_ports_are_an_error() -> None:
    with pytest.raises(OSError, match="fewer than 20000 are free"):
        machine.free_ports(20_000)
