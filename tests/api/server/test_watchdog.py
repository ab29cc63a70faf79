"""The watchdog ends a server whose engine has failed or is stuck, and no other."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest

from mlxserve.api.server.watchdog import ENGINE_FAILED, ENGINE_STUCK, Watchdog
from tests.waiting import wait_until


@dataclass
class Engine:
    silence: float = 0.0
    failed: bool = False
    faults: int = 0  # looks that fail
    looks: int = 0
    ends: list[int] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)

    def has_failed(self) -> bool:
        self.looks += 1
        if self.looks <= self.faults:
            raise MemoryError
        return self.failed

    def seconds_since_beat(self) -> float:
        return self.silence

    def watchdog(self, end_after: float) -> Watchdog:
        return Watchdog(
            self,
            end_after=end_after,
            shut_down=lambda: self.stops.append("asked"),
            end=self.ends.append,
            tick=0.01,
        )


def test_an_engine_that_takes_steps_is_left_alone() -> None:
    engine = Engine(silence=29.0)
    assert engine.watchdog(60).look()
    assert (engine.ends, engine.stops) == ([], [])


def test_a_stuck_step_is_logged_once_with_all_stacks_and_ends_the_process_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(silence=31.0)
    watchdog = engine.watchdog(60)
    with caplog.at_level(logging.ERROR):
        assert watchdog.look()
        assert watchdog.look()
        assert caplog.text.count("has run for 31 seconds") == 1
        assert "Thread MainThread:" in caplog.text
        assert "test_watchdog.py" in caplog.text
        engine.silence = 61.0
        assert not watchdog.look()
    assert engine.ends == [ENGINE_STUCK]


def test_the_stack_of_an_old_thread_is_logged_behind_a_hundred_new_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    goes_on = threading.Event()
    threads = [threading.Thread(target=goes_on.wait, name=f"new {place}") for place in range(120)]
    for thread in threads:
        thread.start()
    try:
        with caplog.at_level(logging.ERROR):
            assert Engine(silence=31.0).watchdog(0).look()
    finally:
        goes_on.set()
        for thread in threads:
            thread.join()
    assert "test_watchdog.py" in caplog.text
    assert caplog.text.count("Thread new ") == len(threads)


def test_zero_seconds_never_end_the_process() -> None:
    engine = Engine(silence=1e6)
    assert engine.watchdog(0).look()
    assert engine.ends == []


def test_a_failed_engine_shuts_the_server_down_with_its_exit_code() -> None:
    engine = Engine(failed=True)
    watchdog = engine.watchdog(60)
    watchdog.start()
    watchdog.stop()
    assert (engine.stops, watchdog.exit_code) == (["asked"], ENGINE_FAILED)


def test_it_looks_again_after_a_look_that_failed_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(faults=3)
    watchdog = engine.watchdog(0)
    with caplog.at_level(logging.ERROR):
        watchdog.start()
        wait_until(lambda: engine.looks > 4, complaint="it looks no more")
        engine.failed = True
        wait_until(lambda: watchdog.exit_code, complaint="it looks no more")
        watchdog.stop()
    assert caplog.text.count("could not look at the engine") == 1
    assert (engine.stops, watchdog.exit_code) == (["asked"], ENGINE_FAILED)


def test_it_stops_looking_when_it_is_stopped() -> None:
    watchdog = Engine().watchdog(60)
    watchdog.start()
    watchdog.stop()
    assert "mlxserve-watchdog" not in {thread.name for thread in threading.enumerate()}


# ---- the whole process

_FAULTY = """
import ctypes, os, sys, time
from mlxserve.system.machine import prepare
prepare()
from mlxserve.model.runner import ModelRunner
from mlxserve.api.server import watchdog

def fails(*_, **__):
    raise RuntimeError("the device is gone")

def hangs(*_, **__):
    time.sleep(600)

def locks(*_, **__):
    ctypes.PyDLL(None).sleep(600)  # without giving up the interpreter's lock

watchdog.MAX_SILENCE, watchdog.GRACE = 2.0, 2.0
ModelRunner.launch = {fault}
os.environ["MLXSERVE_TUNING_MAX_ENGINE_FAILURES"] = "2"
sys.argv[1:] = ["serve", "--port", "0", "--watchdog-seconds", "4"]
from mlxserve.cli import main
main()
"""
_BODY = b'{"prompt": "Hello", "max_tokens": 4}'


def _served(fault: str) -> tuple[int, list[int], str]:
    """Exit code, statuses of two requests and stderr of a server with this fault."""
    with subprocess.Popen(
        [sys.executable, "-c", _FAULTY.format(fault=fault)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            statuses = []
            for _ in range(2):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    connection.request(
                        "POST", "/v1/completions", _BODY, {"content-type": "application/json"}
                    )
                    statuses.append(connection.getresponse().status)
                except (OSError, http.client.HTTPException):
                    statuses.append(0)
                finally:
                    connection.close()
            _, errors = process.communicate(timeout=60)
            return process.returncode, statuses, errors
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long
def test_a_server_whose_engine_fails_for_good_ends_with_an_exit_code_of_its_own() -> None:
    code, statuses, errors = _served("fails")
    assert (code, statuses) == (ENGINE_FAILED, [500, 503])
    assert errors.endswith("error: the engine has failed; the log says why.\n")


@pytest.mark.slow
def test_a_server_whose_step_hangs_ends_with_an_exit_code_of_its_own() -> None:
    code, statuses, errors = _served("hangs")
    assert (code, statuses) == (ENGINE_STUCK, [0, 0])
    assert "in hangs" in errors


@pytest.mark.long
def test_a_server_whose_step_holds_pythons_lock_ends_as_well() -> None:
    code, statuses, errors = _served("locks")
    assert (code, statuses) == (-signal.SIGKILL, [0, 0])
    assert "has held Python's lock for 6 seconds" in errors
    assert "in locks" in errors
