"""What mlx.launch is told by commands that run on several machines, and how ranks start again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxserve.api.errors import ApiError
from mlxserve.cli.ranks import RANKS_ENDED, BackOff, run_again
from tests.cli.commands import Run


@pytest.mark.parametrize("of_the_user", [None, "1"])
def test_every_rank_hands_over_from_gpu_to_cpu_as_this_machine_is_told_to(
    of_the_user: str | None, tmp_path: Path
) -> None:
    hosts, told = tmp_path / "hosts.json", tmp_path / "told"
    hosts.write_text("[]")
    launcher = tmp_path / "mlx.launch"
    launcher.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    launcher.chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "MLX_METAL_FAST_SYNCH"}
    if of_the_user is not None:
        environment["MLX_METAL_FAST_SYNCH"] = of_the_user
    subprocess.run(
        [sys.executable, "-m", "mlxserve", "doctor", "--hostfile", str(hosts)],
        env={**environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=True,
    )
    before, _, _ = told.read_text().partition("--\n")
    options = before.splitlines()
    assert options[:2] == ["--hostfile", str(hosts)]
    given = [options[at + 1] for at, name in enumerate(options) if name == "--env"]
    assert given == ([] if of_the_user is None else [f"MLX_METAL_FAST_SYNCH={of_the_user}"])


@pytest.mark.parametrize("code", [0, 2])
def test_doctor_ends_with_the_exit_code_of_the_launcher(
    code: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, launcher = tmp_path / "hosts.json", tmp_path / "mlx.launch"
    hosts.write_text("{")
    launcher.write_text(f"#!/bin/sh\nexit {code}\n")
    launcher.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert run("doctor", "--hostfile", str(hosts)).code == code


class Ranks:
    """Runs of ranks, each with (exit code, seconds for which it was ready, whether it ended in order)."""

    def __init__(self, *runs: tuple[int, float | None, bool], stopped_after: int = 99) -> None:
        self._runs = iter(runs)
        self._stopped_after = stopped_after
        self._ready_seconds = 0.0
        self.num_runs = 0
        self.slept: list[float] = []
        self.refusals: list[ApiError] = []
        self.was_ready = self.has_ended = self.is_stopped = False

    def start(self) -> int:
        code, ready_seconds, self.has_ended = next(self._runs)
        self.num_runs += 1
        self.was_ready |= ready_seconds is not None
        self._ready_seconds = ready_seconds or 0.0
        return code

    def pop_ready_seconds(self) -> float:
        return self._ready_seconds

    def refuse(self, error: ApiError) -> None:
        self.refusals.append(error)

    def sleep(self, seconds: float) -> bool:
        self.slept.append(seconds)
        return len(self.slept) < self._stopped_after

    def run(self, max_failures: int = 3) -> int:
        return run_again(self, self, self.start, BackOff(max_failures), "Mend it.")  # type: ignore[arg-type]


FAILED, ENDED = (70, 1.0, False), (0, 1.0, True)


def test_ranks_that_end_in_order_are_not_started_again() -> None:
    ranks = Ranks(ENDED)
    assert (ranks.run(), ranks.num_runs, ranks.refusals) == (0, 1, [])


def test_ranks_that_never_were_ready_are_not_started_again() -> None:
    ranks = Ranks((1, None, False))
    assert (ranks.run(), ranks.num_runs) == (1, 1)


def test_ranks_that_fail_start_again_and_requests_are_refused_meanwhile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = Ranks(FAILED, FAILED, (70, None, False), ENDED)
    assert (ranks.run(), ranks.num_runs) == (0, 4)
    assert ranks.slept == [1, 2, 4]
    assert {(error.status, error.code) for error in ranks.refusals} == {(503, "restarting")}
    assert "A rank has failed, and all ranks start again in 4 s." in capsys.readouterr().err


def test_ranks_that_fail_several_times_in_a_row_are_given_up_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = Ranks(*[FAILED] * 4)
    assert (ranks.run(), ranks.num_runs) == (RANKS_ENDED, 4)
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == "error: the ranks have failed 4 times in a row. Mend it."


def test_a_failure_after_a_healthy_minute_is_the_first_again() -> None:
    ranks = Ranks(FAILED, FAILED, (70, 61.0, False), FAILED, FAILED, ENDED)
    assert ranks.run() == 0
    assert ranks.slept == [1, 2, 1, 2, 4]


def test_ranks_end_once_where_they_may_not_start_again(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(FAILED)
    assert (ranks.run(0), ranks.num_runs) == (RANKS_ENDED, 1)
    assert "the ranks have ended by themselves" in capsys.readouterr().err


def test_a_signal_while_ranks_wait_to_start_ends_them_in_order() -> None:
    ranks = Ranks(FAILED, stopped_after=1)
    assert (ranks.run(), ranks.num_runs) == (0, 1)


def test_the_wait_grows_to_half_a_minute() -> None:
    back_off = BackOff(99)
    assert [back_off.seconds_after(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
