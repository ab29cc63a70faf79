"""What signals do to a server that starts, answers, or is stuck."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from mlxserve.api.server.hard_exit import HardExit
from tests.api.server.process import ROOT, Process, Start, send_endless_request
from tests.waiting import wait_until

# Python imports a module of this name when it starts.
_LOADS_FOR_EVER = """
import time
from mlxserve.system import machine
machine.import_mlx_lm()
import mlx.core as mx
import mlxserve.model.attention

def load(*args, **kwargs):
    print("loading", flush=True)
    array = mx.ones((1000, 1000))
    while True:
        mx.eval(array @ array)
        time.sleep(0.001)  # mlx holds the GIL for most of the time

mlxserve.model.attention.load = load
"""
_STUCK_STEP = """
import time
from mlxserve.system import machine
machine.import_mlx_lm()
from mlxserve.engine.engine import Engine

step, count = Engine.step, iter(range(10))

def stuck(self):
    if next(count, None) is None:
        time.sleep(3_600)
    return step(self)

Engine.step = stuck
"""


def customised(folder: Path, code: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def rest_of(peer: socket.socket) -> bytes:
    data = b""
    while piece := peer.recv(1_000_000):
        data += piece
    return data


def wait_for_log(process: Process, text: str) -> None:
    def is_there() -> bool:
        log = process.log.read_text()
        assert text in log or process.popen.poll() is None, log
        return text in log

    wait_until(is_there)


@pytest.mark.slow
def test_a_closed_terminal_stops_the_server_like_sigterm(start: Start, tmp_path: Path) -> None:
    flags = ("--drain-seconds", "0", "--disk-cache-size", "1", "--disk-cache-dir", str(tmp_path))
    with start(*flags) as process, send_endless_request(process, stream=True) as peer:
        while process.metric("generation_tokens_total") < 64:  # two pages
            pass
        process.popen.send_signal(signal.SIGHUP)
        assert b'"error":{"message":"The server is stopping.' in rest_of(peer)
        assert process.popen.wait(timeout=60) == 0
        assert list(tmp_path.rglob("*.page"))  # the conversation is on disk


@pytest.mark.slow
def test_a_server_started_with_nohup_ignores_that_its_terminal_was_closed(start: Start) -> None:
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with start(preexec_fn=ignore) as process:
        process.popen.send_signal(signal.SIGHUP)
        assert process.request("GET", "/health")[0] == 200
        assert process.stop() == (0, "")
        assert process.log.read_text().count("Shutting down;") == 1


@pytest.mark.slow
def test_a_second_ctrl_c_ends_streams_with_an_error_event(start: Start) -> None:
    flags = ("--drain-seconds", "600")
    with start(*flags) as process, send_endless_request(process, stream=True) as peer:
        process.wait_for_metric("num_requests_running", 1)
        process.popen.send_signal(signal.SIGINT)
        wait_for_log(process, "Shutting down;")
        process.popen.send_signal(signal.SIGINT)
        assert b'"error":{"message":"The server is stopping.' in rest_of(peer)
        assert process.popen.wait(timeout=60) == 0
        assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 0, marks=pytest.mark.slow),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_while_a_model_loads_ends_the_process_without_aborting(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    popen = subprocess.Popen(
        [sys.executable, "-m", "mlxserve", "serve", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **customised(tmp_path, _LOADS_FOR_EVER)},
    )
    try:
        assert popen.stdout is not None
        assert popen.stdout.readline() == "loading\n"
        popen.send_signal(number)
        _, err = popen.communicate(timeout=30)
    finally:
        popen.kill()
        popen.wait()
    assert popen.returncode == code, err
    assert "terminate called" not in err
    assert "Traceback" not in err


@pytest.mark.long
@pytest.mark.slow  # 15 s: it waits for the last resort
def test_sigterm_ends_a_server_whose_engine_is_stuck(start: Start, tmp_path: Path) -> None:
    env = customised(tmp_path, _STUCK_STEP)
    with (
        start("--drain-seconds", "1", env=env) as process,
        send_endless_request(process, stream=True) as peer,
    ):
        peer.recv(1)
        process.popen.send_signal(signal.SIGTERM)
        assert b'"error":{"message":"The server is stopping.' in rest_of(peer)
        assert process.popen.wait(timeout=60) == 0
        assert "The engine has not stopped in time" in process.log.read_text()


def test_the_earliest_deadline_is_the_one_that_counts() -> None:
    ended: queue.Queue[float] = queue.Queue()
    begun = time.monotonic()
    last_resort = HardExit(lambda: ended.put(time.monotonic()))
    last_resort.end_within(600)
    last_resort.end_within(0.05)
    assert ended.get(timeout=30) - begun >= 0.05
    with pytest.raises(queue.Empty):
        ended.get_nowait()
