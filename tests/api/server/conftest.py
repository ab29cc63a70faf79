"""Server processes with a real engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.server.process import (
    CONTEXT,
    MAX_RUNNING,
    MAX_WAITING,
    Process,
    Start,
    served,
)


@pytest.fixture(scope="session")
def start(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    model = write_model(tmp_path_factory.mktemp("served"), "qwen3", max_position_embeddings=CONTEXT)

    def start_process(*flags: str, **kwargs: Any) -> contextlib.AbstractContextManager[Process]:
        log = tmp_path_factory.mktemp("log") / "stderr"
        sizes = ("--model", str(model), "--num-pages", "1000", "--alias", "tiny")
        return served(log, *sizes, *flags, **kwargs)

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
