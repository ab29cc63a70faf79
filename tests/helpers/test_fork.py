"""A fork is ended for its time or memory, and the process that made it goes on."""

from __future__ import annotations

import os
import re
import signal
import sys

import psutil
import pytest

from mlxserve.helpers.errors import KillReason
from mlxserve.helpers.helper import Helper
from tests.waiting import wait_until

MEMORY = 64 << 20


@pytest.fixture
def helper() -> Helper:
    return Helper("tests.helpers.test_fork:Forker", name="forks", memory=1 << 30)


class Forker:
    """Lives in a helper: the tests' own process has threads."""

    def fork(self, name: str, cpu_seconds: float) -> tuple[str, str]:
        from mlxserve.helpers.fork import forked

        return forked(getattr(self, name), cpu_seconds=cpu_seconds, memory=MEMORY)

    def text(self) -> str:
        return "é" * 3

    def nothing(self) -> str:
        return ""

    def loop(self) -> str:
        re.match(r"(a*)*b", "a" * 60)
        return "never"

    def eat(self) -> str:
        blocks = [b"x" * (8 << 20) for _ in range(1_000)]
        return str(len(blocks))

    def end(self) -> str:
        os.kill(os.getpid(), signal.SIGSEGV)
        return "never"

    def fail(self) -> str:
        raise LookupError("a bug")


def fork(helper: Helper, name: str, cpu_seconds: float = 10.0) -> tuple[str, str]:
    reason, text = helper.call("fork", name, cpu_seconds, seconds=60)
    return reason, text


def test_what_the_work_returns_comes_back(helper: Helper) -> None:
    assert fork(helper, "text") == ("", "ééé")
    assert fork(helper, "nothing") == ("", "")
    helper.close()


def test_a_fork_is_ended_and_the_next_begins_in_the_same_helper(helper: Helper) -> None:
    assert fork(helper, "loop", 0.05) == (KillReason.TIME, "")
    assert fork(helper, "eat") == (KillReason.MEMORY, "")
    assert fork(helper, "end") == (KillReason.ENDED, "")
    assert fork(helper, "fail") == (KillReason.ENDED, "")
    assert fork(helper, "text") == ("", "ééé")
    assert helper.num_started == 1
    helper.close()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the children of a process")
def test_killing_a_helper_ends_what_it_has_forked(helper: Helper) -> None:
    others = set(psutil.Process().children())
    assert fork(helper, "nothing") == ("", "")
    [child] = set(psutil.Process().children()) - others
    job = helper.begin("fork", "loop", 60.0, seconds=60)
    wait_until(lambda: bool(child.children()))
    [grandchild] = child.children()
    job.cancel()
    wait_until(lambda: not grandchild.is_running())
    helper.close()
