"""No request fails where models take turns in the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.several_models import run_several_models


@pytest.mark.long
@pytest.mark.parametrize(
    "minutes",
    [0.3, 2.0],
)
def test_four_models_answer_eight_clients_with_memory_for_two(
    minutes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the half hour of `python -m tests.reliability models`."""
    monkeypatch.setenv("MLXSERVE_DISK_CACHE_SIZE", "0.1")
    monkeypatch.setenv("MLXSERVE_DISK_CACHE_DIR", str(tmp_path / "pages"))
    report = run_several_models(tmp_path, minutes)
    print(report)
    assert report.is_good, str(report)
    assert report.loads > 8
