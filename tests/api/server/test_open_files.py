"""Servers in a process that may open few files, as containers and service managers set it."""

from __future__ import annotations

import logging
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial

import pytest

from mlxserve.api.server.connection import Limits
from mlxserve.core.errors import InvalidConfig
from tests.api.server.process import CHAT, HELLO, ROOT, Start


def set_limit(num_files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_files", [64, *(pytest.param(n, marks=pytest.mark.long) for n in (256, 1024))]
)
def test_a_server_with_a_low_hard_limit_of_open_files_answers_under_many_connections(
    start: Start, num_files: int
) -> None:
    with start(preexec_fn=partial(set_limit, num_files)) as process, ExitStack() as idle:
        for _ in range(80):
            idle.enter_context(socket.create_connection(("127.0.0.1", process.port), timeout=60))
        body = {"messages": HELLO, "max_tokens": 2}
        assert process.request("POST", CHAT, body)[0] == 200
        log = process.log.read_text()
        assert "Traceback" not in log, log
        accepted = f"may have {num_files} open files, so it accepts {num_files - 48} connections"
        assert (accepted in log) == (num_files < 1_048)
        assert process.stop() == (0, "")


def test_too_low_a_limit_of_open_files_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxserve", "serve", "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=partial(set_limit, 32),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: This process may have 32 open files")
    assert "at least 56" in done.stderr
    assert "ulimit -n 4096" in done.stderr
    assert done.stderr.count("\n") == 1


def test_importing_mlx_lm_raises_the_soft_limit_and_leaves_the_hard_one() -> None:
    """Its import would set 2,048 and 4,096, which fails below and lowers what is above."""
    code = (
        "import resource\n"
        "calls = []\n"
        "resource.setrlimit = record = lambda *call: calls.append(call)\n"
        "from mlxserve.system import machine\n"
        "machine.import_mlx_lm()\n"
        "import mlx_lm.utils\n"
        "assert resource.setrlimit is record\n"
        "assert calls == [(resource.RLIMIT_NOFILE, (256, 256))], calls\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (200, 256)),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_limits_are_fitted_to_the_files_that_may_be_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(connections=1_000)
    with caplog.at_level(logging.WARNING):
        assert limits.within(1_048) is limits
        assert not caplog.records
        assert limits.within(100).connections == 52
        assert limits.within(100).backlog == 8
    assert "accepts 52 connections instead of 1000" in caplog.text
    with pytest.raises(InvalidConfig, match="may have 55 open files"):
        limits.within(55)
