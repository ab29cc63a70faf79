"""Server processes with a real engine."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.server.process import (
    CONTEXT,
    MAX_RUNNING,
    MAX_WAITING,
    ROOT,
    Process,
    Start,
)


@pytest.fixture(scope="session")
def start(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    model = write_model(tmp_path_factory.mktemp("served"), "qwen3", max_position_embeddings=CONTEXT)

    @contextlib.contextmanager
    def start_process(
        *flags: str, env: dict[str, str] | None = None, **kwargs: Any
    ) -> Iterator[Process]:
        log = tmp_path_factory.mktemp("log") / "stderr"
        command = [sys.executable, "-m", "mlxserve", "serve", "--model", str(model)]
        command += ["--port", "0", "--num-pages", "1000", "--alias", "tiny", *flags]
        with log.open("w") as stderr:
            popen = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(env or {})},
                **kwargs,
            )
        assert popen.stdout is not None
        try:
            line = popen.stdout.readline()
            ready = re.fullmatch(r"mlxserve is ready at (http://\S+:[0-9]+)\n", line)
            assert ready, (line, log.read_text())
            yield Process(popen, ready[1], log)
        finally:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
            popen.stdout.close()

    return start_process


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Process]:
    """One server for the tests of a file. Afterwards nothing runs and it shuts down cleanly."""
    sizes = ("--max-num-seqs", str(MAX_RUNNING), "--max-num-waiting", str(MAX_WAITING))
    with start(*sizes) as process:
        yield process
        process.wait_for_metric("num_requests_running", 0)
        assert process.metric("kv_cache_usage_perc") == 0
        assert process.stop() == (0, "")
        assert "Traceback" not in process.log.read_text()
