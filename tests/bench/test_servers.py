"""Servers to be measured: what they are started with, and that they end with the benchmark."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import psutil
import pytest

from mlxserve.bench import servers
from mlxserve.bench.servers import Contender
from mlxserve.hub.embedded import model_path


def test_mlx_lm_gets_the_folder_of_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    @contextlib.contextmanager
    def child(
        name: str, command: list[str], _ready: str, environment: Mapping[str, str]
    ) -> Iterator[Contender]:
        assert environment == {"A": "b"}
        commands.append(command)
        yield Contender(name, "http://127.0.0.1:9", "", 2.0, 1.5, 1)

    monkeypatch.setattr(servers, "run_child", child)
    with servers.mlx_lm_server("mlxserve-mini", {"A": "b"}) as server:
        assert server.model == str(model_path())
        assert (server.start_seconds, server.start_cpu_seconds, server.process_id) == (2.0, 1.5, 1)
    assert commands[0][-2:] == ["--model", str(model_path())]


# A server that answers anything, and a benchmark of it that never ends by itself.
_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Ready).serve_forever()
"""
_BENCH = f"""
import signal, sys, time
from mlxserve.bench.servers import run_child

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run in the background
with run_child("one", [sys.executable, "-c", {_SERVER!r}], "/", {{}}) as server:
    print(server.process_id, flush=True)
    while True:
        time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_that_is_told_to_end_ends_its_servers(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BENCH],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as bench:
        try:
            assert bench.stdout is not None
            server = psutil.Process(int(bench.stdout.readline()))
            bench.send_signal(number)
            assert bench.wait(30) != 0
            assert not psutil.pid_exists(server.pid) or not server.is_running()
        finally:
            bench.kill()


def test_signal_handlers_are_as_before_once_the_server_has_ended() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with servers.run_child("one", [sys.executable, "-c", _SERVER], "/", {}):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
