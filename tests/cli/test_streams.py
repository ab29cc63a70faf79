"""`mlxserve serve` whose standard streams cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest

from mlxserve.system.machine import free_ports
from tests.cli.commands import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize(
    "redirection",
    [
        ">/dev/full 2>&1",
        pytest.param(">/dev/full", marks=pytest.mark.long),
        pytest.param("2>/dev/full", marks=pytest.mark.long),
    ],
)
def test_a_server_starts_answers_and_ends_when_its_output_cannot_be_written(
    redirection: str,
) -> None:
    check_server(redirection)


@pytest.mark.parametrize(
    "redirection",
    [
        "<&- >&- 2>&-",
        pytest.param(">&-", marks=pytest.mark.long),
        pytest.param("2>&-", marks=pytest.mark.long),
    ],
)
def test_a_server_starts_answers_and_ends_when_its_streams_are_closed(redirection: str) -> None:
    check_server(redirection)


def check_server(redirection: str) -> None:
    [port] = free_ports(1)
    command = f'exec "$0" -m mlxserve serve --num-pages 50 --port {port} {redirection}'
    null: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    popen = subprocess.Popen(["/bin/sh", "-c", command, sys.executable], cwd=ROOT, **null)
    try:
        replies: list[httpx.Response | None] = []

        def has_answered() -> bool:
            assert popen.poll() is None, popen.returncode
            replies.append(ask(port))
            return replies[-1] is not None

        wait_until(has_answered)
        assert replies[-1] is not None
        assert replies[-1].status_code == 200
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(timeout=60) == 0
    finally:
        popen.kill()
        popen.wait()


def ask(port: int) -> httpx.Response | None:
    body = {"prompt": "x", "max_tokens": 2}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    except httpx.TransportError:
        return None
