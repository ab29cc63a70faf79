"""A BLAS is loaded before mlx is imported: the best that loads, or the one that the user names."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.system import blas
from mlxserve.system.blas import Blas, SlowBlasWarning

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
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Blas]:
    """load_blas() as in a process that has not imported mlx."""
    # Not by deleting it from sys.modules: the thread of another test's engine may import it again,
    # and that ends the process.
    monkeypatch.setattr(blas, "is_mlx_imported", lambda: False)
    monkeypatch.delenv("MLXSERVE_BLAS", raising=False)

    def run(libraries: Libraries, candidates: tuple[tuple[str, str], ...] = ()) -> Blas:
        monkeypatch.setattr(ctypes, "CDLL", libraries)
        found = [(name, Path(path)) for name, path in candidates]
        monkeypatch.setattr(blas, "blas_libraries", lambda: iter(found))
        return blas.load_blas()

    return run


def test_the_first_library_that_loads_is_loaded_for_all_to_see(
    load: Callable[..., Blas],
) -> None:
    libraries = Libraries(blas=("/b/mkl", "/b/openblas"))
    found = load(libraries, (("MKL", "/b/mkl"), ("OpenBLAS", "/b/openblas")))
    assert found == Blas("MKL", "/b/mkl", is_fast=True)
    assert libraries.asked == [("/b/mkl", ctypes.RTLD_GLOBAL)]


def test_a_library_that_fails_or_is_no_blas_makes_way_for_the_next(
    load: Callable[..., Blas],
) -> None:
    libraries = Libraries(blas=("/b/openblas",), others=("/b/other",))
    candidates = (("MKL", "/b/broken"), ("MKL", "/b/other"), ("OpenBLAS", "/b/openblas"))
    assert load(libraries, candidates) == Blas("OpenBLAS", "/b/openblas", is_fast=True)


def test_a_library_that_the_user_names_is_the_only_one_tried(
    load: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_BLAS", "/mine")
    libraries = Libraries(blas=("/mine", "/b/mkl"))
    assert load(libraries, (("MKL", "/b/mkl"),)) == Blas("MLXSERVE_BLAS", "/mine", is_fast=True)
    assert [path for path, _ in libraries.asked] == ["/mine"]


@pytest.mark.parametrize("path", ["/missing", "/other"])
def test_a_library_that_the_user_names_and_that_is_none_is_refused(
    path: str, load: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_BLAS", path)
    libraries = Libraries(blas=("/b/mkl",), others=("/other",))
    with pytest.raises(InvalidConfig, match=f"MLXSERVE_BLAS={path} cannot be loaded"):
        load(libraries, (("MKL", "/b/mkl"),))


def test_without_any_library_there_is_a_warning_that_says_what_to_install(
    load: Callable[..., Blas],
) -> None:
    with pytest.warns(SlowBlasWarning, match="install .*mkl`") as caught:
        found = load(Libraries())
    assert len(caught) == 1
    assert found == Blas("mlx's reference BLAS", None, is_fast=False)


def test_once_mlx_is_imported_no_library_is_loaded_any_more(
    load: Callable[..., Blas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "is_mlx_imported", lambda: True)
    libraries = Libraries(blas=("/b/mkl",))
    with pytest.warns(SlowBlasWarning, match="imported before"):
        found = load(libraries, (("MKL", "/b/mkl"),))
    assert (found.path, found.is_fast, libraries.asked) == (None, False, [])


def test_every_candidate_is_a_file_of_a_known_kind() -> None:
    for name, path in blas.blas_libraries():
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
        "from mlxserve.system import machine\n"
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
        "from mlxserve.system import machine; machine.prepare()",
        MLXSERVE_BLAS="/no/such/library.so",
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mlxserve.core.errors.InvalidConfig: MLXSERVE_BLAS=/no/such/library.so")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac loads no BLAS")
def test_a_process_without_a_blas_warns_once_however_often_it_prepares() -> None:
    done = python(
        "from mlxserve.system import blas, machine\n"
        "blas.blas_libraries = lambda: iter(())\n"
        "machine.prepare(); machine.memory()\n"
        "assert not machine.prepare().is_fast\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SlowBlasWarning") == 1


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac loads no BLAS")
def test_a_process_that_imported_mlx_first_is_warned_of_its_slow_blas() -> None:
    done = python(
        "import mlx.core\nfrom mlxserve.system import machine\nassert not machine.prepare().is_fast\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Call prepare() or make the LLM first" in done.stderr
