"""What clients see when a rank fails: a sentence soon, and no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlxserve.system.machine import free_ports
from tests.api.server.process import ROOT, Process, send_endless_request, served
from tests.ranks.test_equality import NOT_BY_LAYERS
from tests.waiting import wait_until

SECONDS = 15.0  # --distributed-timeout-seconds of the tests that wait for it
PATIENCE = 120.0  # of the others, in which a busy machine starts a worker, too
SIZES = ("--num-pages", "400", "--max-num-seqs", "4", "--disable-log-stats")
PAGE = 32
ONCE = ("--max-rank-restarts", "0")

StartRanks = Callable[..., contextlib.AbstractContextManager[tuple[Process, psutil.Process]]]


@pytest.fixture(scope="module")
def ranks(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> StartRanks:
    """A server of two ranks and its worker's process, both ended at the end of the block."""
    model = write_model(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=8_000)

    @contextlib.contextmanager
    def start(seconds: float = PATIENCE, *flags: str) -> Iterator[tuple[Process, psutil.Process]]:
        log = tmp_path_factory.mktemp("log") / "stderr"
        timeout = ("--distributed-timeout-seconds", str(seconds))
        options = (*SIZES, "-tp", "2", *timeout, *(flags or ONCE))
        with served(log, "--model", str(model), *options) as process:
            below = psutil.Process(process.popen.pid).children(recursive=True)
            [worker] = [each for each in below if "mlxserve.ranks" in each.cmdline()]
            try:
                yield process, worker
            finally:
                for each in (worker, *below):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()

    return start


def read_until_end(peer: object) -> bytes:
    data = b""
    while piece := peer.recv(65_536):  # type: ignore[attr-defined]
        data += piece
    return data


@pytest.mark.slow
def test_two_ranks_answer_over_http_and_end_when_they_are_told_to(ranks: StartRanks) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "ignore_eos": True}
    with ranks() as (process, worker):
        status, text = process.request("POST", "/v1/chat/completions", body)
        assert status == 200, text
        assert json.loads(text)["usage"]["completion_tokens"] == 8
        # It says so each second.
        wait_until(lambda: 'rank="1"' in process.request("GET", "/metrics")[1])
        assert process.stop() == (0, "")
        assert worker.wait(60) is None or not worker.is_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.ranks)]
)
def test_a_lost_worker_ends_the_server_with_a_sentence(
    fault: signal.Signals, ranks: StartRanks
) -> None:
    reason = "rank 1 is gone" if fault is signal.SIGKILL else "rank 1 has been silent"
    with ranks(PATIENCE if fault is signal.SIGKILL else SECONDS) as (process, worker):
        with send_endless_request(process, stream=True) as peer:
            assert peer.recv(20)
            worker.send_signal(fault)
            told = read_until_end(peer).decode()
        assert "The engine failed: " + reason in told
        assert process.popen.wait(60) == 70
        assert reason in process.log.read_text()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.wait(60)
        assert not worker.is_running()


@pytest.mark.slow
def test_ranks_start_again_after_one_was_killed_and_find_their_pages(
    ranks: StartRanks, tmp_path: Path
) -> None:
    text = " ".join(f"word {number}" for number in range(200))
    body = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    disk = ("--disk-cache-size", "1", "--disk-cache-dir", str(tmp_path))

    def ask(process: Process) -> tuple[str, int, int]:
        status, reply = process.request("POST", "/v1/completions", body)
        assert status == 200, reply
        answer = json.loads(reply)
        cache = answer["usage"]["cache"]
        num_pages = answer["usage"]["prompt_tokens"] // PAGE
        return answer["choices"][0]["text"], num_pages, cache["tokens_from_disk"]

    def pages_of_each_rank() -> list[int]:
        return [len(list(folder.glob("*/*.page"))) for folder in tmp_path.glob("*/")]

    statuses = set()

    def is_well(process: Process) -> bool:
        # A connection that is opened while the next server takes over may be closed.
        with contextlib.suppress(ConnectionError):
            statuses.add(process.request("GET", "/health")[0])
        return 200 in statuses

    with ranks(PATIENCE, *disk) as (process, worker):
        wanted, num_pages, num_from_disk = ask(process)
        assert num_pages >= 8
        assert num_from_disk == 0
        wait_until(lambda: [n >= num_pages for n in pages_of_each_rank()] == [True, True])
        with send_endless_request(process, stream=True) as peer:
            assert peer.recv(20)
            worker.kill()
            told = read_until_end(peer).decode()
        assert "rank 1 is gone" in told
        assert "It starts again by itself: ask again." in told
        wait_until(lambda: process.request("GET", "/health")[0] == 503)
        wait_until(lambda: is_well(process), seconds=600)
        assert statuses == {200, 503}
        answer, _, num_from_disk = ask(process)
        assert answer == wanted
        assert num_from_disk >= (num_pages - 1) * PAGE
        assert "A rank has failed, and all ranks start again in 1 s." in process.log.read_text()
        assert process.stop()[0] == 0


# Read by every Python at its start: a worker that goes on living, but takes part in no step after the
# fifth, so that rank 0 waits in a collective for ever.
STUCK = """
import sys
if "mlxserve.ranks" in sys.orig_argv:
    from mlxserve.system import machine
    machine.import_mlx_lm()
    from mlxserve.ranks.worker import RankWorker
    step, count = RankWorker._step, 0
    def stuck(self, frame):
        global count
        count += 1
        if count <= 5:
            step(self, frame)
    RankWorker._step = stuck
"""


@pytest.mark.ranks
def test_a_collective_that_is_stuck_ends_the_server_with_a_sentence(
    ranks: StartRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with ranks(SECONDS) as (process, worker):
        with send_endless_request(process, stream=True) as peer:
            told = read_until_end(peer).decode()
        assert f"a step has not ended for {SECONDS:g} s" in told
        assert process.popen.wait(60) == 70
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.wait(60)
        assert not worker.is_running()


@pytest.mark.slow
def test_a_worker_ends_when_rank_0_does(ranks: StartRanks) -> None:
    with ranks() as (process, worker), send_endless_request(process, stream=True) as peer:
        assert peer.recv(20)
        hostfile = Path(worker.environ()["MLX_HOSTFILE"])
        assert hostfile.exists()
        process.popen.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.wait(60)
        assert not worker.is_running()
        assert not hostfile.exists()


def test_a_worker_without_rank_0_removes_the_hostfile_that_rank_0_wrote(tmp_path: Path) -> None:
    hostfile, port = tmp_path / "mlxserve-hosts-1.json", free_ports(1)[0]
    hostfile.touch()
    code, text = run_module(
        "mlxserve.ranks",
        stdin=json.dumps({"tensor_parallel_size": 2, "distributed_timeout_seconds": 1.0}),
        TMPDIR=str(tmp_path),
        MLX_RANK="1",
        MLX_HOSTFILE=str(hostfile),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    assert code == 70
    assert f"error: rank 1: Rank 0 is not at 127.0.0.1:{port}" in text
    assert not hostfile.exists()


def serve_fails(*flags: str, **environment: str) -> tuple[int, str]:
    """The exit code and stderr of a server that cannot start."""
    return run_module("mlxserve", "serve", "--port", "0", *flags, **environment)


def run_module(
    module: str, *arguments: str, stdin: str | None = None, **environment: str
) -> tuple[int, str]:
    """The exit code and stderr of a process that ends by itself."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, done.stderr


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    code, text = serve_fails(
        *("-tp", "2", "--distributed-timeout-seconds", "1", "--master-port", str(free_ports(1)[0])),
        MLX_RANK="0",
        MLX_HOSTFILE=str(hosts),
    )
    assert code == 1
    assert "Ranks [1] of 2 have not come within 1 s" in text
    assert "Traceback" not in text


@pytest.mark.long
def test_a_size_that_does_not_divide_is_refused_and_leaves_no_process(
    model_folder: Callable[[str], Path],
) -> None:
    code, text = serve_fails("--model", str(model_folder("llama")), "-tp", "3")
    assert code == 1
    assert "tensor_parallel_size=3 does not divide. Sizes that do: 2, 4." in text
    assert "Traceback" not in text
    left = [p for p in psutil.process_iter(["cmdline"]) if _is_rank_of(p, os.getpid())]
    assert left == []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(NOT_BY_LAYERS[0], marks=pytest.mark.slow),
        *(pytest.param(kind, marks=pytest.mark.ranks) for kind in NOT_BY_LAYERS[1:]),
    ],
)
def test_a_kind_that_cannot_be_split_by_layers_is_refused(
    kind: str, model_folder: Callable[[str], Path]
) -> None:
    code, text = serve_fails("--model", str(model_folder(kind)), "-pp", "2")
    assert code == 1
    assert f"{kind} model" in text.splitlines()[-1]
    assert text.splitlines()[-1].startswith("error: ")


def _is_rank_of(process: psutil.Process, pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        parents = [parent.pid for parent in process.parents()]
        return pid in parents and "mlxserve.ranks" in (process.info["cmdline"] or [])
    return False
