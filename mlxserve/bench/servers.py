"""Servers to measure: ours and mlx-lm's as child processes, or any running server by its address.

Each child has a free port and a log file, and is stopped by this process or when this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType

import httpx
import psutil

from mlxserve.core.errors import MlxServeError
from mlxserve.hub.files import find_model
from mlxserve.system.machine import free_ports

_START_SECONDS = 300.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.02

# mlx-lm's server with the BLAS that ours loads, so that the ratio compares the engines.
_MLX_LM = (
    "import sys; from mlxserve.system.machine import prepare; prepare(); "
    "from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
)


class ServerFailed(MlxServeError):
    """A server to be measured did not start."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A running server: its name in the tables, its address and its model."""

    name: str
    url: str
    model: str
    start_seconds: float = 0.0  # until the server is ready
    start_cpu_seconds: float = 0.0  # CPU of its process and children, until then
    process_id: int | None = None  # if we started it


@contextlib.contextmanager
def our_server(
    name: str,
    model: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Contender]:
    """Run `mlxserve serve` with these options. Raises ServerFailed with the end of its log.

    Its disk cache is off, and has a folder of its own if the options turn it on.
    """
    command = [sys.executable, "-m", "mlxserve", "serve", "--model", model, "--exit-with-parent"]
    command += ["--disable-log-stats", "--disk-cache-size", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        run_child(
            name, [*command, "--disk-cache-dir", folder, *options], "/ready", environment
        ) as server,
    ):
        yield replace(server, model=_first_model(server.url))


@contextlib.contextmanager
def mlx_lm_server(
    model: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Contender]:
    """Run mlx-lm's server on the same files. Raises ServerFailed with the end of its log."""
    files = find_model(model)
    if files.gguf is not None:
        raise ServerFailed(f"mlx-lm's server cannot load {files.name}, which is a GGUF file.")
    path = str(files.path)
    command = [sys.executable, "-c", _MLX_LM, "--model", path]
    with run_child("mlx-lm", command, "/health", environment) as server:
        yield replace(server, model=path)


@contextlib.contextmanager
def _ends_when_told() -> Iterator[None]:
    """End the block on SIGTERM and SIGHUP, as Ctrl+C does: no server outlives this process."""
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers.
        numbers = ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        # Such as SIGHUP after `nohup`.
        if handler != signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def run_child(
    name: str, command: list[str], ready: str, environment: Mapping[str, str]
) -> Iterator[Contender]:
    """Run a command's server until its path `ready` answers; it names no model yet.

    Raises ServerFailed.
    """
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with _ends_when_told(), tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        started = time.perf_counter()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.PIPE,  # ours ends when this closes
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "HF_HUB_OFFLINE": "1"},
            )
        try:
            _wait(name, process, url + ready, log)
            seconds = time.perf_counter() - started
            yield Contender(name, url, "", seconds, _cpu_seconds(process.pid), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _wait(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    # One client for all polls: creating one takes 50 ms of the CPU that the server needs to start.
    with httpx.Client(trust_env=False, verify=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(url).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(_POLL_SECONDS)
    end = log.read_text(errors="replace")[-2000:]
    raise ServerFailed(f"{name} did not start; the end of its log:\n{end}")


def _cpu_seconds(process_id: int) -> float:
    """User and system time of a process and its children."""
    process = psutil.Process(process_id)
    used = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            used += times.user + times.system
    return used


def _first_model(url: str) -> str:
    # As patient as with a start: other work may keep the machine busy.
    reply = httpx.get(f"{url}/v1/models", trust_env=False, timeout=_START_SECONDS)
    return str(reply.json()["data"][0]["id"])
