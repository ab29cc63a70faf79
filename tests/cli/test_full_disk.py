"""Whatever frees space, or takes a right away, works where nothing can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_disk import run_on_small_disk


@pytest.mark.slow
def test_commands_that_free_space_work_on_a_full_disk(tmp_path: Path) -> None:
    *_, last = run_on_small_disk(tmp_path, "12m", "tests.cli.full_disk")
    assert last == "all of it"
