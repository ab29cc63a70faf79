"""A server that was paused, or whose helpers were, goes on and blames no client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.api.server.process import CHAT, HELLO, Process, send_endless_request, served
from tests.waiting import wait_until

_WATCHED = """
from mlxserve.api.server import watchdog
watchdog.GRACE = 2.0
from mlxserve.cli import main
main()
"""
ANSWERED = (200, ": ")
_WATCHDOG_SECONDS, _PAUSE_SECONDS = 5, 10.0


def pause(pid: int) -> None:
    """For longer than both watchdogs wait."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + _PAUSE_SECONDS
    wait_until(lambda: time.monotonic() > until)
    os.kill(pid, signal.SIGCONT)


def ask(server: Process, **more: object) -> tuple[int, str]:
    status, text = server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 2, **more})
    error = json.loads(text).get("error") or {"code": "", "message": ""}
    return status, f"{error['code']}: {error['message']}"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Process]:
    """With a watchdog of a few seconds, and its other process of two more."""
    with served(
        tmp_path / "log", "--watchdog-seconds", str(_WATCHDOG_SECONDS), program=("-c", _WATCHED)
    ) as process:
        yield process


@pytest.mark.long
def test_an_idle_server_goes_on_after_a_pause_longer_than_its_watchdog_waits(
    watched: Process,
) -> None:
    pause(watched.popen.pid)
    assert ask(watched)[0] == 200
    assert json.loads(watched.request("GET", "/health")[1])["status"] == "ok"
    assert watched.stop()[0] == 0
    assert "has run for" not in watched.log.read_text()


@pytest.mark.long
def test_a_stream_goes_on_after_a_pause_longer_than_the_watchdog_waits(watched: Process) -> None:
    with contextlib.closing(send_endless_request(watched, stream=True)) as peer:
        assert b"data:" in read_until(peer, b"data:")
        pause(watched.popen.pid)
        for _ in range(20):
            assert b"data:" in read_until(peer, b"data:")
    assert ask(watched)[0] == 200
    assert watched.stop()[0] == 0


def read_until(peer: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received and (piece := peer.recv(64)):
        received += piece
    return received


@pytest.mark.long
def test_requests_whose_helpers_are_stopped_are_to_be_sent_again(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    other = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    with served(tmp_path / "log") as server:
        assert ask(server, response_format=schema) == ANSWERED
        for helper in psutil.Process(server.popen.pid).children():
            if "mlxserve.helpers.child" in helper.cmdline():
                helper.suspend()
        status, error = ask(server)
        assert status == 503
        assert error.startswith("helper_unavailable: ")
        assert error.endswith("was paused; send the request again")
        status, error = ask(server, response_format=other)
        assert status == 503
        assert error == (
            "helper_unavailable: response_format.json_schema.schema: the compiler was paused; "
            "send the request again"
        )
        assert ask(server, response_format=other) == ANSWERED
        assert ask(server) == ANSWERED
