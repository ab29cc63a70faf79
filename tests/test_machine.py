"""prepare() loads a BLAS before mlx is imported; and what is known of the machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve import machine
from mlxserve.errors import InvalidConfig
from mlxserve.machine import Blas, SlowBlasWarning

ROOT = Path(__file__).parents[1]


class Libraries:
    """Stands for ctypes.CDLL: loads the paths it was given, and remembers what it was asked."""

    def __init__(self, *, blas: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> None:
        self._blas, self._others = blas, others
        self.asked: list[tuple[str, int]] = []

    def __call__(self, path: str, mode: int = 0) -> object:
        self.asked.append((path, mode))
        if path in self._blas:
            return type("Library", (), {"cblas_sgemm": None})()
        if path in self._others:
            return object()
        raise OSError(f"{path}: cannot open shared object file")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Blas]:
    """prepare() as in a process on Linux that has neither run it nor imported mlx."""
    monkeypatch.setattr(sys, "platform", "linux")
    # Not by deleting it from sys.modules: the thread of another test's engine may import it again,
    # and that ends the process.
    monkeypatch.setattr(machine, "is_mlx_imported", lambda: False)
    monkeypatch.delenv("MLXSERVE_BLAS", raising=False)

    def run(libraries: Libraries, candidates: tuple[tuple[str, str], ...] = ()) -> Blas:
        monkeypatch.setattr(ctypes, "CDLL", libraries)
        found = [(name, Path(path)) for name, path in candidates]
        monkeypatch.setattr(machine, "blas_libraries", lambda: iter(found))
        return machine.prepare.__wrapped__()

    return run


def test_the_first_library_that_loads_is_loaded_for_all_to_see(
    prepared: Callable[..., Blas],
) -> None:
    libraries = Libraries(blas=("/b/mkl", "/b/openblas"))
    blas = prepared(libraries, (("MKL", "/b/mkl"), ("OpenBLAS", "/b/openblas")))
    assert blas == Blas("MKL", "/b/mkl", is_fast=True)
    assert libraries.asked == [("/b/mkl", ctypes.RTLD_GLOBAL)]


def test_a_library_that_fails_or_is_no_blas_makes_way_for_the_next(
    prepared: Callable[..., Blas],
) -> None:
    libraries = Libraries(blas=("/b/openblas",), others=("/b/other",))
    candidates = (("MKL", "/b/broken"), ("MKL", "/b/other"), ("OpenBLAS", "/b/openblas"))
    assert prepared(libraries, candidates) == Blas("OpenBLAS", "/b/openblas", is_fast=True)


def test_a_library_that_the_user_names_is_the_only_one_tried(
    prepared: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_BLAS", "/mine")
    libraries = Libraries(blas=("/mine", "/b/mkl"))
    assert prepared(libraries, (("MKL", "/b/mkl"),)) == Blas("MLXSERVE_BLAS", "/mine", is_fast=True)
    assert [path for path, _ in libraries.asked] == ["/mine"]


@pytest.mark.parametrize("path", ["/missing", "/other"])
def test_a_library_that_the_user_names_and_that_is_none_is_refused(
    path: str, prepared: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_BLAS", path)
    libraries = Libraries(blas=("/b/mkl",), others=("/other",))
    with pytest.raises(InvalidConfig, match=f"MLXSERVE_BLAS={path} cannot be loaded"):
        prepared(libraries, (("MKL", "/b/mkl"),))


def test_without_any_library_there_is_a_warning_that_says_what_to_install(
    prepared: Callable[..., Blas],
) -> None:
    with pytest.warns(SlowBlasWarning, match="pip install mkl") as caught:
        blas = prepared(Libraries())
    assert len(caught) == 1
    assert blas == Blas("mlx's reference BLAS", None, is_fast=False)


def test_a_mac_needs_no_library(
    prepared: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("MLXSERVE_BLAS", "/missing")
    libraries = Libraries()
    assert prepared(libraries).is_fast
    assert libraries.asked == []


def test_once_mlx_is_imported_no_library_is_loaded_any_more(
    prepared: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_mlx_imported", lambda: True)
    libraries = Libraries(blas=("/b/mkl",))
    with pytest.warns(SlowBlasWarning, match="imported before"):
        blas = prepared(libraries, (("MKL", "/b/mkl"),))
    assert (blas.path, blas.is_fast, libraries.asked) == (None, False, [])


def test_mlx_gets_its_defaults_but_keeps_what_the_user_set(
    prepared: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "removed in the next line, restored at the end")
    del os.environ["MLX_MAX_MB_PER_BUFFER"]
    monkeypatch.setattr(machine, "total_memory", lambda: 16 << 30)
    prepared(Libraries(blas=("/b",)), (("MKL", "/b"),))
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    assert os.environ["MLX_MAX_MB_PER_BUFFER"] == "64"


def test_every_candidate_is_a_file_of_a_known_kind() -> None:
    for name, path in machine.blas_libraries():
        assert name in ("MKL", "OpenBLAS")
        assert path.is_absolute()
        assert ".so" in path.name


# ---- in a process of its own, where the order is what is tested


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "MLXSERVE_BLAS"}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac loads no BLAS")
def test_prepare_loads_the_blas_before_mlx() -> None:
    done = python(
        "import ctypes, sys\n"
        "loaded, real = [], ctypes.CDLL\n"
        "def spy(path, *a, **k):\n"
        "    if 'blas' in str(path) or 'mkl' in str(path):\n"
        "        loaded.append('mlx.core' in sys.modules)\n"
        "    return real(path, *a, **k)\n"
        "ctypes.CDLL = spy\n"
        "from mlxserve import machine\n"
        "assert 'mlx.core' not in sys.modules\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "machine.prepare()\n"
        "assert 'mlx.core' not in sys.modules\n"
        "assert not any(loaded), loaded\n"
        "assert bool(loaded) == (machine.prepare().path is not None)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac loads no BLAS")
def test_a_broken_library_ends_the_process_with_the_reason() -> None:
    done = python(
        "from mlxserve import machine; machine.prepare()", MLXSERVE_BLAS="/no/such/library.so"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mlxserve.errors.InvalidConfig: MLXSERVE_BLAS=/no/such/library.so")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac loads no BLAS")
def test_a_process_without_a_blas_warns_once_however_often_it_prepares() -> None:
    done = python(
        "from mlxserve import machine\n"
        "machine.blas_libraries = lambda: iter(())\n"
        "machine.prepare(); machine.memory()\n"
        "assert not machine.prepare().is_fast\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SlowBlasWarning") == 1


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac loads no BLAS")
def test_a_process_that_imported_mlx_first_is_warned_of_its_slow_blas() -> None:
    done = python(
        "import mlx.core\nfrom mlxserve import machine\nassert not machine.prepare().is_fast\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Call prepare() or make the LLM first" in done.stderr


# ---- what the machine is


def test_memory_to_plan_with_is_part_of_what_there_is() -> None:
    found = machine.memory()
    assert 0 < found.working_set <= found.total


def test_a_cpu_plans_with_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_metal", lambda: False)
    assert machine.memory().working_set == machine.memory().total // 4


class Limits:
    """Stands for mlx's limits, and remembers them."""

    cache: int | None = None
    wired: int | None = None


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Of a GPU with a working set of 1,000 bytes."""
    import mlx.core as mx

    found = Limits()
    monkeypatch.setattr(machine, "working_set", lambda: 1000)
    monkeypatch.setattr(mx, "set_cache_limit", lambda size: setattr(found, "cache", size))
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: setattr(found, "wired", size))
    return found


def test_nothing_is_wired_unless_it_is_asked_for(limits: Limits) -> None:
    machine.limit_metal_memory(cache=100, wired=None)
    assert (limits.cache, limits.wired) == (100, None)
    machine.limit_metal_memory(cache=200, wired=1000)
    assert (limits.cache, limits.wired) == (200, 1000)


def test_more_wired_memory_than_macos_allows_is_refused(limits: Limits) -> None:
    with pytest.raises(InvalidConfig, match=r"wired_limit=.* GiB, but macOS"):
        machine.limit_metal_memory(cache=100, wired=1001)
    assert (limits.cache, limits.wired) == (None, None)


def test_facts_are_sentences_for_a_report() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowBlasWarning)
        facts: dict[str, Any] = machine.facts()
    assert {"mlxserve", "python", "system", "memory", "mlx", "device", "blas"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
    assert facts["device"] == ("Metal" if machine.is_metal() else "CPU")


# ---- freed memory

# Page faults of writing 16 MB again and again, in a process whose malloc was asked to keep memory.
_PAGE_FAULTS = """
import ctypes, resource, sys
from mlxserve.machine import keep_freed_memory
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
