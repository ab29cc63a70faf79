"""Finding a compiler, and saying what to install when there is none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator import CompilerNotFound
from tests.emulator.frontend import Dialect
from tests.emulator.toolchain import PRELUDE, VARIABLE, compile_flags, find_toolchain


def fake_clang(folder: Path, name: str, version: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho 'Some clang version {version} (of a vendor)'\n")
    program.chmod(0o700)
    return program


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_ziglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ziglang", None)


def test_a_compiler_is_there() -> None:
    """The emulator's tests need one: this says so, plainly, when it is missing."""
    assert find_toolchain().version


@pytest.mark.usefixtures("programs", "no_ziglang")
def test_without_a_compiler_the_error_says_what_to_install() -> None:
    with pytest.raises(CompilerNotFound, match=r"pip install ziglang.*or put clang 17 or newer"):
        find_toolchain()


@pytest.mark.usefixtures("programs")
def test_the_ziglang_wheel_is_enough() -> None:
    toolchain = find_toolchain()
    assert toolchain.is_zig
    assert Path(toolchain.compiler[0]).is_absolute()


@pytest.mark.usefixtures("no_ziglang")
def test_a_clang_that_is_too_old_does_not_count(programs: Path) -> None:
    fake_clang(programs, "clang", "16.0.6")
    with pytest.raises(CompilerNotFound):
        find_toolchain()


def test_the_newest_clang_on_the_path_is_taken(programs: Path) -> None:
    fake_clang(programs, "clang-17", "17.0.1")
    newest = fake_clang(programs, "clang-19", "19.1.7")
    fake_clang(programs, "clang", "18.1.3")
    assert find_toolchain().compiler == (str(newest),)
    assert "19.1.7" in find_toolchain().version


def test_a_compiler_can_be_chosen(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clang(programs, "clang-19", "19.1.7")
    mine = fake_clang(programs, "mine", "18.0.0")
    monkeypatch.setenv(VARIABLE, str(mine))
    assert find_toolchain().linker == (str(mine),)
    monkeypatch.setenv(VARIABLE, "zig")
    assert find_toolchain().is_zig
    monkeypatch.setenv(VARIABLE, "absent")
    with pytest.raises(CompilerNotFound, match=f"{VARIABLE}=absent is not a clang 17 or newer"):
        find_toolchain()


@pytest.mark.parametrize("dialect", ["c++", "opencl"])
@pytest.mark.parametrize("target", ["x86_64-linux-gnu", "aarch64-linux-gnu", "arm64-apple-macos14"])
def test_the_prelude_compiles_for_every_machine(target: str, dialect: Dialect) -> None:
    machine = target.split("-")[0]
    command = [
        *find_toolchain().compiler,
        f"--target={target}",
        *compile_flags(dialect, check=False, machine=machine),
        *("-fsyntax-only", str(PRELUDE)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
