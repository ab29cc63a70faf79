"""Real models, which come as Python packages: no hub is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server.process import Process, served


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`mlxserve serve -m` SmolLM2's file."""
    log = tmp_path_factory.mktemp("real") / "log"
    with served(log, "-m", str(smollm2), "--num-pages", "256") as process:
        yield process
