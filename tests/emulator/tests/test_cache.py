"""Compiled kernels are kept in a folder that only this user can write."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import CacheNotUsable, build, kernel, metal_kernel, toolchain
from tests.emulator.cache import VARIABLE, cache_folder, digest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, apart from zig's own, which takes seconds to build."""
    shared = cache_folder() / "zig"
    shared.mkdir(exist_ok=True)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / "zig").symlink_to(shared)
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def run_once(number: object = 1) -> list[float]:
    add = metal_kernel(
        "kept", ["x"], ["out"], f"uint i = thread_position_in_grid.x; out[i] = x[i] + {number};"
    )
    (out,) = add(
        inputs=[mx.arange(8).astype(mx.float32)],
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
    )
    return [float(value) for value in np.array(out)]


def test_a_second_run_compiles_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_once()
    kept = sorted(path.name for path in fresh.iterdir())

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    assert run_once() == first == [float(k + 1) for k in range(8)]
    assert sorted(path.name for path in fresh.iterdir()) == kept


def test_only_finished_files_are_left(fresh: Path) -> None:
    run_once()
    suffixes = sorted(path.suffix for path in fresh.iterdir() if path.name != "zig")
    # MLX's preamble, a record, our prelude with the preamble, kernel and runtime.
    assert suffixes == [".h", ".json", ".pch", ".so", ".so"]


def test_the_preamble_is_read_once_for_all_kernels(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is most of a kernel's text."""
    read: list[str] = []

    def preprocess(source: str, *options: Any) -> str:
        read.append(toolchain.preprocess(source, *options))
        return read[-1]

    monkeypatch.setattr(build, "preprocess", preprocess)
    assert run_once(1) != run_once(2)
    preamble, *kernels = map(len, read)
    assert max(kernels) < preamble / 10
    assert len(kernels) == 2
    assert [path.suffix for path in fresh.iterdir()].count(".pch") == 1


def test_another_preamble_is_read_anew(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its macros, its functions and its names of vectors are known behind it."""
    header = tmp_path / kernel.PREAMBLE
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(kernel, "mlx_include_folder", lambda: tmp_path)
    text = (
        "using namespace metal;\ntypedef vec<float, 2> Pair;\n#define NUMBER {}\n"
        "inline float of(Pair x) {{ return x.y; }}\n"
    )
    for number in (3.0, 4.0, 3.0):
        header.write_text(text.format(number))
        assert run_once("of(Pair(0.0f, NUMBER))") == [number + k for k in range(8)]


def test_processes_that_start_together_agree(fresh: Path) -> None:
    script = "import runpy, sys; print(runpy.run_path(sys.argv[1])['run_once']())"
    command = [sys.executable, "-c", script, __file__]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == [f"{[float(k + 1) for k in range(8)]}\n"] * 2


def test_the_folder_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "deep" / "cache"))
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_it_lies_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    assert cache_folder() == tmp_path / caches / "metal-emulator"


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_others_can_write_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(CacheNotUsable, match=rf"not private.*chmod 700.*{VARIABLE}"):
        cache_folder()


def test_a_folder_that_cannot_be_made_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheNotUsable, match=f"set {VARIABLE} to a folder of your own"):
        cache_folder()


def test_a_digest_keeps_its_parts_apart() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab", b"c") == digest(b"ab", "c")
