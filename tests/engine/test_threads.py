"""A thread that has computed never ends: it waits to be hired again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest

from mlxserve.engine.threads import JobThread, JobThreads, result_of

TIMEOUT = 30


def run(worker: JobThread) -> threading.Thread:
    """Run a job and return the thread it ran on."""
    threads: list[threading.Thread] = []
    assert worker.start(lambda: threads.append(threading.current_thread())).wait(TIMEOUT)
    return threads[0]


def test_jobs_run_on_a_named_daemon_thread() -> None:
    worker = JobThreads().hire()
    thread = run(worker)
    assert thread is worker.thread
    assert thread is not threading.current_thread()
    assert thread.name == "mlxserve-engine"
    assert thread.daemon


def test_a_thread_whose_job_has_ended_is_hired_again() -> None:
    pool = JobThreads()
    first = pool.hire()
    run(first)
    second = pool.hire()
    assert second is first
    assert run(second) is first.thread


def test_busy_threads_are_not_hired_again_until_their_jobs_have_ended() -> None:
    pool = JobThreads()
    go = threading.Event()
    workers = [pool.hire() for _ in range(3)]
    ends = [worker.start(lambda: assert_set(go)) for worker in workers]
    another = pool.hire()
    assert len({*workers, another}) == 4
    assert not any(end.is_set() for end in ends)
    go.set()
    assert all(end.wait(TIMEOUT) for end in ends)
    run(another)
    assert {pool.hire() for _ in range(4)} == {*workers, another}


def assert_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT)


def test_a_job_and_what_it_refers_to_are_freed_when_it_ends() -> None:
    class Model:
        pass

    def job(held: Model = Model()) -> None:  # noqa: B008
        assert held

    assert job.__defaults__
    model = weakref.ref(job.__defaults__[0])
    end = JobThreads().hire().start(job)
    del job
    assert end.wait(TIMEOUT)
    assert model() is None


def test_a_process_whose_worker_has_computed_exits_without_an_error() -> None:
    code = (
        "import mlxserve.model\n"
        "import mlx.core as mx\n"
        "from mlxserve.engine.threads import THREADS\n"
        "f = mx.compile(lambda x: mx.sin(x) * 2)\n"
        "assert THREADS.hire().start(lambda: mx.eval(f(mx.ones(8)))).wait(60)\n"
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


def test_a_signal_that_does_not_interrupt_a_wait_is_handled_during_it() -> None:
    """As one does that arrives just before the wait begins; here, another thread receives it."""
    future: Future[str] = Future()
    giving_up = threading.Timer(TIMEOUT, future.set_result, ["the signal was not handled"])

    def receive() -> None:
        while not future.running():  # what is waited for has begun
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, lambda *_: future.set_result("handled"))
    receiving = threading.Thread(target=receive)
    try:
        receiving.start()
        giving_up.start()
        future.set_running_or_notify_cancel()
        assert result_of(future) == "handled"
    finally:
        signal.signal(signal.SIGUSR1, old)
        giving_up.cancel()
        receiving.join()


def test_the_exception_of_a_future_is_raised() -> None:
    future: Future[None] = Future()
    future.set_exception(TimeoutError("the model's"))
    with pytest.raises(TimeoutError, match="the model's"):
        result_of(future)
