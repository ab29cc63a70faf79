"""Every figure of the report is a number or says why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlxserve.doctor import figures
from mlxserve.doctor.children import ChildFailed
from mlxserve.doctor.figures import TIMES_OF_ANSWERS, chosen, measure
from mlxserve.doctor.measurement import Measurement
from mlxserve.system import machine

ATTENTION = {"name": "a decode", "unit": "GB/s", "ours": 2.0, "mlx_lm": 1.0, "absent": None}
OURS = {"prefill 512": 900.0, "prefill 2048": 1000.0, "decode": 50.0, "peak 512": 30.0}
OURS["peak 2048"] = 120.0
HOST = {"host": 4.0}
TIMES = dict.fromkeys(TIMES_OF_ANSWERS, 5.0)
THEIRS = {**OURS, **HOST}


class Children:
    """Answers in place of child processes; `failing` are the tasks that fail."""

    def __init__(self, failing: Mapping[str, str] | None = None) -> None:
        self._failing = failing or {}
        self.environments: list[dict[str, str]] = []

    def __call__(self, task: str, environment: dict[str, str], *arguments: str) -> Any:
        self.environments.append(environment)
        name = arguments[0] if arguments else task
        if name in self._failing:
            raise ChildFailed(self._failing[name])
        return {
            "attention": [ATTENTION],
            "ours": OURS,
            "host": HOST,
            "times": TIMES,
            "rows": {"1": 20.0, "2": 21.5},
            "theirs": THEIRS,
            "chosen": {"pages": 7},
        }[name]


def measured(
    monkeypatch: pytest.MonkeyPatch, children: Children, *, is_metal: bool = True
) -> dict[str, Measurement]:
    monkeypatch.setattr(figures, "run_child", children)
    monkeypatch.setattr(machine, "is_metal", lambda: is_metal)
    monkeypatch.setattr(machine, "working_set", machine.total_memory)  # for engines of other tests
    return {found.name: found for found in measure("model")}


def test_ours_and_mlx_lm_stand_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, Children())
    assert found["a decode"] == Measurement(**ATTENTION)
    for name, unit, ours in (
        ("prefill of 512 tokens", "tokens/s", 900.0),
        ("prefill of 2048 tokens", "tokens/s", 1000.0),
        ("decode of one answer", "tokens/s", 50.0),
        ("CPU time to build a decode's graph", "ms", 4.0),
        ("peak memory of a prefill of 512 tokens", "MB", 30.0),
        ("peak memory of a prefill of 2048 tokens", "MB", 120.0),
    ):
        assert found[name] == Measurement(name, unit, ours, ours)


def test_steps_are_measured_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, Children())
    assert found["step of 1 row"] == Measurement("step of 1 row", "ms", 20.0)
    assert found["step of 2 rows"].ours == 21.5
    assert "step of 32 rows" not in found  # a smaller one took a second


@pytest.mark.parametrize(("host", "bound"), [(4.0, "the device"), (15.0, "the host")])
def test_the_report_says_whether_the_host_or_the_device_bounds_the_model(
    host: float, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes 20 ms."""
    monkeypatch.setitem(HOST, "host", host)
    found = measured(monkeypatch, Children())
    share = found[f"host's share of a decode, which is bound by {bound}"]
    assert (share.ours, share.unit, share.absent) == (host / 20 * 100, "%", None)


def test_times_of_answers_are_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, Children())
    for name in (
        "compilation at load",
        "first token of the first answer",
        "fourth token of the first answer, whose graph is recorded",
        "first token after a pause of seconds",
        "longest gap between two tokens while the cache grows",
        "decode of one answer after the cache has grown",
    ):
        assert (found[name].ours, found[name].mlx_lm, found[name].absent) == (5.0, None, None)


def test_memory_is_measured_at_three_sizes_of_command_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = Children()
    found = measured(monkeypatch, children)
    sizes = [e["MLX_MAX_MB_PER_BUFFER"] for e in children.environments if e]
    assert sizes == ["50", "100", "400"]
    for size in sizes:
        name = f"peak memory of a prefill of 2048 tokens, MLX_MAX_MB_PER_BUFFER={size}"
        assert found[name] == Measurement(name, "MB", 120.0)


def test_without_metal_the_sizes_of_command_buffers_are_absent_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = Children()
    found = measured(monkeypatch, children, is_metal=False)
    assert not any(children.environments)
    absent = [each for name, each in found.items() if "PER_BUFFER" in name]
    assert len(absent) == 12
    assert {each.absent for each in absent} == {"only Metal has command buffers"}


@pytest.mark.parametrize("task", ["attention", "ours", "host", "theirs", "rows", "times"])
def test_a_child_that_fails_leaves_the_figures_of_the_others(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(monkeypatch, Children({task: "ended by SIGKILL"}))
    for each in found.values():
        assert (each.absent is not None) >= (each.ours is None)
    absent = [each.absent for each in found.values() if each.absent]
    assert absent
    assert all("ended by SIGKILL" in reason for reason in absent)
    assert any(each.absent is None for each in found.values())


def test_a_failure_of_ours_is_absent_and_the_other_figures_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child's answer of another form, and a machine that cannot be asked."""

    def fail() -> bool:
        raise RuntimeError("no device")

    monkeypatch.setattr(figures, "run_child", Children())
    monkeypatch.setattr(machine, "is_metal", fail)
    found = list(measure("model"))
    assert found[-1] == Measurement("command buffers", "", absent="RuntimeError: no device")
    assert found[0] == Measurement(**ATTENTION)
    monkeypatch.setattr(figures, "run_child", lambda *_arguments: [{"unknown": 1}])
    found = list(measure("model"))
    assert len(found) == 5
    for each in found:
        assert each.absent is not None
        assert each.ours is None


def test_a_model_that_does_not_load_is_the_reason_of_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "run_child", Children({"chosen": "OutOfMemory: no"}))
    assert chosen("model") == {"absent": "OutOfMemory: no"}
    monkeypatch.setattr(figures, "run_child", Children())
    assert chosen("model") == {"pages": 7}


def test_a_figure_is_one_line() -> None:
    assert str(Measurement("decode", "GB/s", 123.4, 1.5)) == (
        "decode: mlxserve 123 GB/s, mlx-lm 1.50 GB/s"
    )
    assert str(Measurement("decode", "GB/s", absent="no Metal")) == "decode: absent: no Metal"
    assert str(Measurement("decode", "GB/s", 1.0, absent="mlx-lm: no")) == (
        "decode: mlxserve 1.00 GB/s; absent: mlx-lm: no"
    )
