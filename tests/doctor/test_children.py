"""Checks in processes of their own: what they answer, and every way in which they can end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve.doctor import child
from mlxserve.doctor.children import ChildFailed, run_child


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for Python, that runs the text written to it."""
    file = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(file))
    return file


def write(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o700)


def test_a_child_gets_its_task_and_variables_and_its_last_line_is_the_answer(
    answering: Path,
) -> None:
    write(answering, 'echo compiling; echo "[\\"$*\\", \\"$MLX_MAX_OPS_PER_BUFFER\\"]"')
    answer = run_child("fences", {"MLX_MAX_OPS_PER_BUFFER": "0"}, "here")
    assert answer == ["-m mlxserve.doctor.child fences here", "0"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo Traceback >&2; echo 'ValueError: no' >&2; exit 1", "ValueError: no"),
        ("exit 71", "exit code 71"),
        (f"kill -{int(signal.SIGKILL)} $$", "ended by SIGKILL"),
        ("echo hello", "printed 'hello' instead of an answer"),
        ("true", "printed '' instead of an answer"),
        ("exec sleep 60", "not finished after 0 s"),
    ],
)
def test_a_child_that_does_not_answer_fails_with_the_reason(
    answering: Path, text: str, reason: str
) -> None:
    write(answering, text)
    with pytest.raises(ChildFailed, match=f"^{reason}$"):
        run_child("fences", {}, seconds=0.3 if "sleep" in text else 60)


def test_a_child_that_cannot_be_started_fails_with_the_reason(answering: Path) -> None:
    assert not answering.exists()
    with pytest.raises(ChildFailed, match=r"^not started: .*No such file"):
        run_child("fences", {})


def test_a_task_prints_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(child.TASKS, "add", lambda a, b: {"sum": int(a) + int(b)})
    child.main("add", "1", "2")
    assert json.loads(capsys.readouterr().out) == {"sum": 3}


@pytest.mark.skipif(mx.metal.is_available(), reason="on a Mac the kernels run")
def test_without_metal_the_child_says_that_no_kernel_runs() -> None:
    """A real process: the module starts, mlx refuses the kernels, the answer is JSON."""
    answer = run_child("fences", {"MLX_MAX_OPS_PER_BUFFER": "0"}, "quick")
    assert [proof["dtype"] for proof in answer] == ["float16", "bfloat16", "float32", "q8"]
    assert all("a kernel does not run" in proof["with_fences"] for proof in answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "figures"),
    [
        ("chosen", {"pages", "log"}),
        ("ours", {"decode"}),  # prompts of 512 tokens do not fit in the model's context
        ("host", {"host"}),
        ("rows", {"1"}),
        ("theirs", {"decode", "host"}),
    ],
)
def test_a_model_is_measured_by_each_task_that_the_report_asks_for(
    task: str, figures: set[str], model_folder: Callable[[str], Path]
) -> None:
    found = child.model_speeds(task, str(model_folder("qwen3")))
    assert figures <= set(found)
    assert "prefill 512" not in found
