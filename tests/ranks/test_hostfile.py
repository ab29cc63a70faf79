"""`--hostfile` runs a command by mlx.launch on every machine; here both of them are this one, without SSH."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.api.server.process import COMPLETIONS, ROOT, Process, served
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SIZES = ("--num-pages", "100", "--max-num-seqs", "4", "--disable-log-stats")

StartHosts = Callable[..., contextlib.AbstractContextManager[tuple[Process, list[psutil.Process]]]]


@pytest.fixture(scope="module")
def hostfile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("hosts") / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    return file


def first_of_three_ports() -> str:
    """The first of three neighbours that are free."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port: int = server.getsockname()[1]
            for after in (1, 2):
                stack.enter_context(socket.create_server(("127.0.0.1", port + after)))
            return str(port)


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def rank_processes(pid: int) -> list[psutil.Process]:
    """mlx.launch and what it has started, in the order of their ids."""
    return sorted(psutil.Process(pid).children(recursive=True), key=lambda process: process.pid)


def is_rank(process: psutil.Process, rank: str) -> bool:
    """True for a rank's own process; the shell in which mlx.launch starts it has another command."""
    return process.environ().get("MLX_RANK") == rank and "serve" in process.cmdline()


@pytest.fixture
def hosts(hostfile: Path, model_folder: Callable[[str], Path], tmp_path: Path) -> StartHosts:
    """A server on two hosts with its processes, which are killed at the end of the block."""

    @contextlib.contextmanager
    def start(restarts: int = 0) -> Iterator[tuple[Process, list[psutil.Process]]]:
        again = ("--max-rank-restarts", str(restarts))
        flags = ("-pp", "2", "--hostfile", str(hostfile), "--master-port", first_of_three_ports())
        model = str(model_folder("llama"))
        with served(tmp_path / "stderr", "--model", model, *SIZES, *flags, *again) as process:
            below = rank_processes(process.popen.pid)
            try:
                yield process, below
            finally:
                for one in filter(is_alive, below):
                    one.kill()

    return start


def ask(process: Process) -> None:
    body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    status, text = process.request("POST", COMPLETIONS, body)
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] == 4


@pytest.mark.long
def test_a_server_on_two_hosts_answers_and_ends_with_all_its_processes(hosts: StartHosts) -> None:
    with hosts() as (process, below):
        ranks = [one for one in below if "serve" in one.cmdline()]
        assert len(ranks) >= 3, [one.cmdline() for one in below]  # mlx.launch and two ranks
        ask(process)
        assert process.stop() == (0, ""), process.log.read_text()
        psutil.wait_procs(below, timeout=60)
        assert [one.cmdline() for one in below if is_alive(one)] == []


@pytest.mark.ranks
def test_a_server_on_two_hosts_says_so_when_a_rank_dies(hosts: StartHosts) -> None:
    with hosts() as (process, below):
        worker = next(one for one in below if one.environ().get("MLX_RANK") == "1")
        worker.kill()
        assert process.popen.wait(60) == 70
        assert "rank 1 is gone" in process.log.read_text()
        psutil.wait_procs(below, timeout=60)
        assert [one.cmdline() for one in below if is_alive(one)] == []


@pytest.mark.ranks
@pytest.mark.parametrize("rank", ["1", "0"])
def test_a_server_on_two_hosts_starts_again_when_a_rank_dies(rank: str, hosts: StartHosts) -> None:
    """Also when rank 0 dies, which has the API: whoever started all ranks keeps the address."""

    def status() -> int | None:
        # A connection that is opened while the next server takes over may be closed.
        with contextlib.suppress(ConnectionError):
            return process.request("GET", "/health")[0]
        return None

    with hosts(3) as (process, below):
        ask(process)
        [dead] = [one for one in below if is_rank(one, rank)]
        dead.kill()
        psutil.wait_procs(below, timeout=120)
        assert [one.cmdline() for one in below if is_alive(one)] == []
        wait_until(lambda: status() == 503)
        wait_until(lambda: status() == 200, seconds=500)
        ask(process)
        assert process.log.read_text().count("all ranks start again") == 1
        below = rank_processes(process.popen.pid)
        assert dead.pid not in [one.pid for one in below]
        assert process.stop()[0] == 0
        psutil.wait_procs(below, timeout=60)
        assert [one.cmdline() for one in below if is_alive(one)] == []


@pytest.mark.ranks
def test_ranks_end_when_the_launcher_dies(hosts: StartHosts) -> None:
    with hosts() as (process, below):
        below[0].kill()  # mlx.launch
        assert process.popen.wait(60) == 70
        psutil.wait_procs(below, timeout=60)
        assert [one.cmdline() for one in below if is_alive(one)] == []


@pytest.mark.ranks
def test_the_doctor_measures_the_connection_of_two_hosts(hostfile: Path) -> None:
    command = [sys.executable, "-m", "mlxserve", "doctor", "--hostfile", str(hostfile)]
    done = subprocess.run(
        [*command, "--port", first_of_three_ports()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = ("ranks", "sum of one row", "split by heads", "sum of 512 rows")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert len(lines) == len(names), done.stdout
    assert all(line.startswith(name) for line, name in zip(lines, names, strict=True)), done.stdout
    assert lines[0].endswith(" 2")
    assert " us (" in lines[1]


@pytest.mark.ranks
def test_a_doctor_that_is_told_to_end_leaves_no_process(hostfile: Path, tmp_path: Path) -> None:
    """While its ranks wait for each other: one of them is stopped."""
    command = [sys.executable, "-m", "mlxserve", "doctor", "--hostfile", str(hostfile)]
    with (tmp_path / "out").open("w") as out:
        doctor = subprocess.Popen(
            [*command, "--port", first_of_three_ports()], cwd=ROOT, stdout=out, stderr=out
        )
    try:
        while len(below := rank_processes(doctor.pid)) < 3:
            assert doctor.poll() is None
        below[-1].send_signal(signal.SIGSTOP)
        doctor.send_signal(signal.SIGTERM)
        assert doctor.wait(60) == 130
        psutil.wait_procs(below, timeout=60)
        assert [one.cmdline() for one in below if is_alive(one)] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(doctor.pid, signal.SIGKILL)
        doctor.wait()
