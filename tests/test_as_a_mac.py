"""The suite as a Mac runs it, with this machine's kernels: `tests/as_a_mac.py` says what is a Mac's.

No machine that the project is developed on is a Mac, so what a Mac's answers change in a test is found here.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from mlxserve.system import machine

ROOT = Path(__file__).parent.parent
# Suites of their own, and what plants bugs in a copy of the source.
_OTHERS = ("tests/emulator", "tests/mutation", "tests/clients", "tests/training", "tests/strict")
FOLDERS = sorted(
    folder
    for folder in {
        path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")
    }
    if not folder.startswith(_OTHERS)
)
# What a Mac's dtype, step, memory or commits decide, and a model with recurrent layers.
SAMPLE = (
    "tests/model/test_command_buffers.py",
    "tests/doctor/test_model_speeds.py::test_what_was_chosen_has_sizes_limits_and_the_log_that_says_why",
    "tests/test_resizing.py::test_the_context_follows_the_cache_and_what_cannot_be_changes_nothing",
    "tests/test_stateful_requests.py::test_logprobs_are_those_of_the_dense_path[qwen3_next]",
)


def run(*arguments: str, plugin: str = "tests.as_a_mac") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-q", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def collected(*arguments: str) -> list[str]:
    """The ids of tests that a Mac would select."""
    done = run("-n", "0", "--collect-only", *arguments, plugin="tests.as_darwin")
    assert done.returncode == 0, done.stdout[-8000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def files_in(folder: str) -> list[str]:
    """Not those in folders of it, which are run on their own."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / folder).glob("test_*.py"))
        if path != Path(__file__)
    ]


@pytest.mark.mac
@pytest.mark.skipif(machine.is_metal(), reason="this is a Mac")
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_suite_passes_as_on_a_mac(folder: str) -> None:
    done = run(*files_in(folder))
    nothing_selected = 5  # a folder whose tests are all of another suite
    assert done.returncode in (0, nothing_selected), done.stdout[-8000:]


@pytest.mark.slow
@pytest.mark.skipif(machine.is_metal(), reason="this is a Mac")
def test_what_a_macs_answers_decide_passes_as_on_a_mac() -> None:
    done = run("-n", "0", *SAMPLE)
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.mac
@pytest.mark.skipif(machine.is_metal(), reason="this is a Mac")
def test_every_test_of_the_emulated_kernels_is_collected_for_a_macs_gpu() -> None:
    """On macOS: without what only Linux has."""
    machines: dict[str, set[str]] = defaultdict(set)
    for line in collected("-p", "tests.emulated_gpu", "-m", "not mutation", "tests/metal_kernels"):
        name, _, values = line.partition("[")
        machines[name].update({"emulator", "metal"}.intersection(values.rstrip("]").split("-")))
    emulated = {name: found for name, found in machines.items() if "emulator" in found}
    assert len(emulated) > 40
    assert [name for name, found in emulated.items() if "metal" not in found] == []


@pytest.mark.mac
@pytest.mark.skipif(machine.is_metal(), reason="this is a Mac")
@pytest.mark.parametrize("suite", ["not metal", "metal"])
def test_the_suite_is_collected_on_macos(suite: str) -> None:
    assert len(collected("-m", suite, "-p", "tests.emulated_gpu")) > 100


def test_every_folder_of_tests_is_run_as_a_mac_or_is_a_suite_of_its_own() -> None:
    assert {"tests", "tests/api/server", "tests/scheduler", "tests/tui/chat"} <= set(FOLDERS)
    for name in SAMPLE:
        assert (ROOT / name.split("::")[0]).is_file(), name
