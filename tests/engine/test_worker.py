"""A thread that has computed is never ended: it waits, and is hired again."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from mlxserve.engine import worker as worker_module
from mlxserve.engine.worker import Worker, hire

TIMEOUT = 30


def run(worker: Worker) -> threading.Thread:
    """Run a job that notes its thread, to its end."""
    threads: list[threading.Thread] = []
    assert worker.start(lambda: threads.append(threading.current_thread())).wait(TIMEOUT)
    return threads[0]


def test_jobs_run_on_the_workers_own_named_daemon_thread() -> None:
    worker = hire()
    thread = run(worker)
    assert thread is worker.thread
    assert thread is not threading.current_thread()
    assert thread.name == "mlxserve-engine"
    assert thread.daemon


def test_a_worker_whose_job_has_ended_is_hired_again() -> None:
    first = hire()
    run(first)
    second = hire()
    assert second is first
    assert run(second) is first.thread


def test_workers_at_work_are_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_idle", [])  # so that nobody else comes back meanwhile
    go = threading.Event()
    workers = [hire() for _ in range(3)]
    ends = [worker.start(lambda: assert_set(go)) for worker in workers]
    another = hire()
    assert len({*workers, another}) == 4
    assert not any(end.is_set() for end in ends)
    go.set()
    assert all(end.wait(TIMEOUT) for end in ends)
    run(another)
    assert {hire() for _ in range(4)} == {*workers, another}


def assert_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT)


def test_when_a_job_has_ended_nothing_holds_what_it_held() -> None:
    class Model:
        pass

    def job(held: Model = Model()) -> None:  # noqa: B008
        assert held

    assert job.__defaults__
    gone = weakref.ref(job.__defaults__[0])
    end = hire().start(job)
    del job
    assert end.wait(TIMEOUT)
    assert gone() is None


def test_a_process_whose_worker_computed_ends_in_peace() -> None:
    code = (
        "import mlxserve.model\n"
        "import mlx.core as mx\n"
        "from mlxserve.engine.worker import hire\n"
        "f = mx.compile(lambda x: mx.sin(x) * 2)\n"
        "assert hire().start(lambda: mx.eval(f(mx.ones(8)))).wait(60)\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
