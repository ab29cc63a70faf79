"""Helper processes: jobs, their limits, and what is left after a kill."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason
from mlxserve.helpers.frames import LENGTH, MARGIN, MAX_TIMES
from mlxserve.helpers.helper import Helper
from mlxserve.system.suspend_clock import RUNNING, RunningClock
from tests.waiting import wait_until

LONG = 60.0  # seconds that no job here takes, on any machine


@pytest.fixture
def make() -> Iterator[Callable[..., Helper]]:
    """Helpers that are closed at the end, with no child left."""
    made: list[Helper] = []
    before = children()

    def make(*arguments: Any, memory: int = 1 << 30, **options: Any) -> Helper:
        target = "tests.helpers.workers:Worker"
        made.append(Helper(target, *arguments, name="tests", memory=memory, **options))
        return made[-1]

    yield make
    for helper in made:
        helper.close()
    wait_until(lambda: children() <= before, complaint="a child is left")


@pytest.fixture
def helper(make: Callable[..., Helper]) -> Helper:
    return make("one")


def children() -> set[int]:
    """Process ids, also of helpers that other tests of this process have started."""
    return {child.pid for child in psutil.Process().children()}


def pid_of(helper: Helper) -> int:
    return int(helper.call("whoami", seconds=LONG)[1])


def test_a_helper_has_no_key_or_token_in_its_environment(
    make: Callable[..., Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("HF_TOKEN", "MLXSERVE_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "MY_CREDS")
    for name in secrets:
        monkeypatch.setenv(name, f"the secret of {name}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = make().call("environment", seconds=LONG)
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["PATH"] == os.environ["PATH"]
    assert "the secret of" not in str(found)


# ---- jobs


def test_a_job_returns_plain_data_and_the_target_is_made_once(helper: Helper) -> None:
    value = {"a": [1, 2.5, None, True], "b": b"\0\xff", "c": "\ud800 \U0001f600", "d": {"e": []}}
    assert helper.call("echo", value, seconds=LONG) == value
    name, pid = helper.call("whoami", seconds=LONG)
    assert name == "one"
    assert pid_of(helper) == pid != os.getpid()
    assert helper.num_started == 1


def test_no_child_runs_before_the_first_job(make: Callable[..., Helper]) -> None:
    before = children()
    assert make().num_started == 0
    assert children() == before


def test_a_child_that_was_started_long_before_its_first_job_is_not_late(
    make: Callable[..., Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = make("x" * (8 << 20))  # more than the socket takes: it is set up with its first job
    helper.start()
    monkeypatch.setattr(RUNNING, "now", lambda now=RUNNING.now: now() + 1e6)
    assert helper.call("echo", 1, seconds=LONG) == 1
    assert helper.num_started == 1


def test_the_child_gives_way_to_its_parent_if_asked(make: Callable[..., Helper]) -> None:
    ours = os.nice(0)
    assert psutil.Process(pid_of(make("one"))).nice() == ours
    assert psutil.Process(pid_of(make("one", niceness=3))).nice() == min(ours + 3, 19)


def test_large_arguments_and_results_pass(helper: Helper) -> None:
    text = "é" * (5 << 20)
    assert helper.call("echo", text, seconds=LONG) == text


def test_an_exception_arrives_as_its_type_name_and_message(helper: Helper) -> None:
    pid = pid_of(helper)
    with pytest.raises(JobFailed, match="ValueError: no such thing") as caught:
        helper.call("fail", "no such thing", seconds=LONG)
    assert (caught.value.type_name, caught.value.message) == ("ValueError", "no such thing")
    assert pid_of(helper) == pid


def test_what_is_not_plain_data_does_not_come_back(helper: Helper) -> None:
    with pytest.raises(JobFailed, match="TypeError"):
        helper.call("object", seconds=LONG)


def test_a_target_that_cannot_be_made_is_an_error_of_each_job() -> None:
    broken = Helper("tests.helpers.workers:Missing", name="tests", memory=1 << 30)
    for _ in range(2):
        with pytest.raises(JobFailed, match=r"AttributeError.*Missing"):
            broken.call("echo", 1, seconds=LONG)
    broken.close()


def test_the_child_imports_neither_mlx_nor_what_it_does_not_need(helper: Helper) -> None:
    loaded = helper.call("loaded", seconds=LONG)
    assert [name for name in loaded if name.split(".")[0] in ("mlx", "numpy", "transformers")] == []


def test_threads_share_a_helper_and_get_their_own_results(helper: Helper) -> None:
    results: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        results[number] = [helper.call("echo", number, seconds=LONG) for _ in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number] * 50 for number in range(4)}
    assert helper.num_started == 1


# ---- jobs that are begun


def received(job: Any) -> list[Any]:
    values = []
    while not job.is_done:
        values += job.receive(LONG)
    return values


def test_a_begun_job_yields_values_while_the_caller_does_other_things(helper: Helper) -> None:
    job = helper.begin("count", 1000, seconds=LONG)
    assert received(job) == list(range(1000))
    job = helper.begin("echo", "x", seconds=LONG)
    assert received(job) == []
    assert job.result == "x"


def test_beginning_does_not_wait_for_the_child(make: Callable[..., Helper]) -> None:
    helper = make("x" * (8 << 20))  # more than the socket takes
    job = helper.begin("echo", "y" * (8 << 20), seconds=LONG)
    assert job.receive() == []
    assert not job.is_done
    assert received(job) == []
    assert len(job.result) == 8 << 20


def test_only_one_job_at_a_time_is_begun(helper: Helper) -> None:
    job = helper.begin("loop", seconds=LONG)
    with pytest.raises(RuntimeError, match="has a job"):
        helper.begin("echo", 1, seconds=LONG)
    job.cancel()
    assert helper.call("echo", 1, seconds=LONG) == 1


def test_the_values_before_an_endless_one_arrive(helper: Helper) -> None:
    helper.call("echo", 1, seconds=LONG)
    job = helper.begin("count", 3, "loop", seconds=0.5)
    values: list[int] = []
    while len(values) < 3:
        values += job.receive(LONG)
    with pytest.raises(HelperKilled, match=r"^took longer than 0.5 s$"):
        job.receive(LONG)
    assert values == [0, 1, 2]
    assert job.is_done


def test_the_deadline_counts_from_the_last_value(helper: Helper) -> None:
    helper.call("echo", 1, seconds=LONG)
    job = helper.begin("sleepy", 8, 0.25, seconds=1.5)
    assert received(job) == list(range(8))


# ---- limits


def test_an_endless_job_is_killed_at_its_deadline(helper: Helper) -> None:
    pid = pid_of(helper)
    began = time.monotonic()
    with pytest.raises(HelperKilled, match=r"^took longer than 0.5 s$") as caught:
        helper.call("loop", seconds=0.5)
    assert caught.value.reason is KillReason.TIME
    assert time.monotonic() - began >= 0.5
    wait_until(lambda: not psutil.pid_exists(pid), complaint="it lives")
    assert pid_of(helper) != pid
    assert helper.num_started == 2


def test_a_job_gets_the_time_in_which_it_had_no_processor_and_not_more(helper: Helper) -> None:
    """It sleeps, which looks the same."""
    helper.call("echo", 1, seconds=LONG)
    assert received(helper.begin("sleepy", 1, 1.0, seconds=0.5)) == [0]
    with pytest.raises(HelperKilled, match=r"^took longer than 0.1 s$") as caught:
        received(helper.begin("sleepy", 1, LONG, seconds=0.1))
    assert caught.value.reason is KillReason.TIME


def test_a_job_that_takes_too_much_memory_is_killed(make: Callable[..., Helper]) -> None:
    helper = make(memory=128 << 20)
    assert helper.call("eat", 32 << 20, seconds=LONG) == 4
    with pytest.raises(HelperKilled, match=r"^needed more than 128 MB of memory$") as caught:
        helper.call("eat", 1 << 40, seconds=LONG)
    assert caught.value.reason is KillReason.MEMORY
    assert helper.call("echo", 1, seconds=LONG) == 1


def test_the_parent_sees_a_child_grow_whose_address_space_does_not(
    make: Callable[..., Helper],
) -> None:
    """As on macOS, where the system limits no address space."""
    helper = make("one", 512 << 20, memory=128 << 20)
    size = helper.call("echo", helper.resident_size, seconds=LONG)
    assert size < helper.resident_size < 128 << 20
    with pytest.raises(HelperKilled, match=r"^needed more than 128 MB of memory$"):
        helper.call("use_reserved", seconds=LONG)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_a_child_that_dies_in_its_job_is_an_error_and_the_next_job_works(
    helper: Helper, number: int, words: str
) -> None:
    with pytest.raises(HelperKilled, match=rf"^ended its process \({words}\)$") as caught:
        helper.call("end", int(number), seconds=LONG)
    assert caught.value.reason is KillReason.ENDED
    assert helper.call("echo", 1, seconds=LONG) == 1


def test_a_write_that_fails_ends_the_process_at_once(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the rest, and its caller for an answer, as long as the job may take."""
    send, failures = socket.socket.send, [OSError("planted")]

    def failing(self: socket.socket, data: Any) -> int:
        if failures:
            raise failures.pop()
        return send(self, data)

    assert helper.call("echo", 1, seconds=LONG) == 1
    monkeypatch.setattr(socket.socket, "send", failing)
    assert helper.call_twice("echo", 2, seconds=LONG) == 2
    assert helper.num_started == 2


def test_a_job_whose_process_was_killed_is_called_twice_at_most(
    helper: Helper, tmp_path: Path
) -> None:
    marks = str(tmp_path / "mark")
    assert helper.call_twice("die_at_first", marks, 1, seconds=LONG) == 1
    assert helper.num_started == 2
    with pytest.raises(HelperKilled) as caught:
        helper.call_twice("die_at_first", marks, 9, seconds=LONG)
    assert caught.value.reason is KillReason.ENDED
    assert helper.num_started == 3
    with pytest.raises(HelperKilled, match="took longer"):
        helper.call_twice("loop", seconds=0.1)
    assert helper.num_started == 4, "it is called once more for no other reason"


def test_a_child_that_died_between_two_jobs_is_replaced(helper: Helper) -> None:
    pid = pid_of(helper)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, complaint="it lives")
    assert pid_of(helper) != pid


def test_a_system_without_processes_or_sockets_is_one_error(
    make: Callable[..., Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(24, "Too many open files")

    helper = make()
    with monkeypatch.context() as patch:
        patch.setattr("mlxserve.helpers.process.subprocess.Popen", refuse)
        with pytest.raises(HelperKilled, match=r"was not begun: .*Too many open files"):
            helper.call("echo", 1, seconds=LONG)
    assert helper.call("echo", 1, seconds=LONG) == 1


# ---- pauses


def test_a_child_that_is_stopped_is_not_said_to_take_too_long(helper: Helper) -> None:
    os.kill(pid_of(helper), signal.SIGSTOP)
    with pytest.raises(HelperKilled, match=r"^was paused$") as caught:
        helper.call("echo", 1, seconds=0.5)
    assert caught.value.reason is KillReason.PAUSED
    assert helper.call("echo", 1, seconds=LONG) == 1
    with pytest.raises(HelperKilled, match=r"^took longer than 0.5 s$"):
        helper.call("loop", seconds=0.5)


def test_a_child_whose_own_timer_ended_it_in_a_pause_of_both_neither(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(helper)
    job = helper.begin("sleepy", 1, LONG, seconds=0.1)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    monkeypatch.setattr(RUNNING, "was_paused", lambda seconds: seconds >= MAX_TIMES * 0.1 + MARGIN)
    with pytest.raises(HelperKilled, match=r"^was paused$"):
        job.receive(LONG)


@pytest.mark.slow
def test_a_job_goes_on_after_a_pause_of_this_process(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_of(helper)
    pauses = [0.0]
    clock = RunningClock(lambda: time.monotonic() + sum(pauses), tick=1e6)
    clock.start()
    monkeypatch.setattr("mlxserve.helpers.job.RUNNING", clock)
    job = helper.begin("sleepy", 1, 1.0, seconds=LONG)
    pauses.append(1e6)
    assert received(job) == [0]
    late = helper.begin("loop", seconds=0.5)
    monkeypatch.setattr(clock, "was_paused", lambda _seconds: True)
    with pytest.raises(HelperKilled, match=r"^was paused$"):
        late.receive(LONG)


# ---- ends


def test_closing_kills_a_job_at_once_and_its_caller_hears_of_it(helper: Helper) -> None:
    pid = pid_of(helper)
    caught: list[HelperKilled] = []

    def ask() -> None:
        try:
            helper.call("loop", seconds=LONG)
        except HelperKilled as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: psutil.Process(pid).cpu_times().user > 0.2, complaint="the job does not run")
    helper.close()
    thread.join(LONG)
    assert [error.reason for error in caught] == [KillReason.CLOSED]
    assert not psutil.pid_exists(pid)
    with pytest.raises(HelperKilled, match="closed"):
        helper.call("echo", 1, seconds=LONG)


def test_a_forgotten_helper_ends_its_child() -> None:
    helper = Helper("tests.helpers.workers:Worker", name="tests", memory=1 << 30)
    pid = pid_of(helper)
    del helper
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("method", ["send", "recv_into"])
def test_a_job_never_gets_the_answer_of_one_before_it(
    helper: Helper, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    assert helper.call("echo", "first", seconds=LONG) == "first"
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, method, fail)
        with pytest.raises(HelperKilled, match="MemoryError"):
            helper.call("echo", "second", seconds=LONG)
    assert helper.call("echo", "third", seconds=LONG) == "third"


@pytest.mark.slow
def test_twenty_kills_leave_no_process_and_no_open_file(helper: Helper) -> None:
    def num_open() -> int:
        return psutil.Process().num_fds()

    others = children()
    pid_of(helper)
    before = num_open()
    for number in range(20):
        if number % 2:
            with pytest.raises(HelperKilled):
                helper.call("end", int(signal.SIGKILL), seconds=LONG)
        else:
            helper.begin("loop", seconds=LONG).cancel()
    assert helper.num_started == 20
    pid = pid_of(helper)
    # What earlier tests left may end meanwhile.
    assert num_open() <= before
    assert pid in children() <= {*others, pid}
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_signals_of_the_terminal_and_of_a_service_manager_are_not_for_the_child(
    helper: Helper,
) -> None:
    assert helper.call("interrupt", seconds=LONG) == "still here"
    session, group, pid = helper.call("session", seconds=LONG)
    assert session == group == pid


def test_the_child_shares_neither_stdin_nor_stdout(
    helper: Helper, capfd: pytest.CaptureFixture[str]
) -> None:
    assert helper.call("say", seconds=LONG) == ""
    helper.close()
    assert capfd.readouterr().out == ""


PARENT = """
import sys
from mlxserve.helpers.helper import Helper
from tests.waiting import wait_until
helper = Helper("tests.helpers.workers:Worker", name="tests", memory=1 << 30)
print(helper.call("whoami", seconds=60)[1], flush=True)
helper.call(sys.argv[1], seconds=1) if sys.argv[1] else sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("job", ["loop", ""], ids=["in_a_job", "idle"])
def test_a_child_ends_after_its_parent_was_killed(job: str) -> None:
    """In a job it holds the GIL in C and hears nothing: the system's timer ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            child = psutil.Process(int(process.stdout.readline()))
            if job:
                wait_until(lambda: child.cpu_times().user > 0.2, complaint="the job does not run")
            assert child.is_running()
        finally:
            process.kill()
    assert psutil.wait_procs([child], LONG)[1] == []


@pytest.mark.parametrize("is_set_up", [False, True])
def test_a_child_whose_parent_ended_without_reading_ends_in_silence(is_set_up: bool) -> None:
    """What was not read makes the parent's end an error of the socket, not an end of what it sends."""
    ours, other = socket.socketpair()
    command = [sys.executable, "-m", "mlxserve.helpers.child"]
    with other:
        child = subprocess.Popen(command, stdin=other.fileno(), stderr=subprocess.PIPE)
        if is_set_up:
            setup = pickle.dumps(("tests.helpers.workers:Worker", (), LONG, 1 << 30, 0))
            ours.sendall(LENGTH.pack(len(setup)) + setup)
            wait_until(lambda: select.select([ours], [], [], 0)[0])
        other.sendall(b"of nobody")
        ours.close()
    _, said = child.communicate(timeout=LONG)
    assert (child.returncode, said) == (0, b"")
