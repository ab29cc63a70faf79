"""What ranks on this machine are started with."""

from __future__ import annotations

import io
import os
import subprocess
from typing import Any

import pytest

from mlxserve.ranks.local import LocalRanks


class Started:
    """Stands for a process, which has ended."""

    environments: list[dict[str, str]]

    def __init__(self, _command: object, *, env: dict[str, str], **_options: Any) -> None:
        self.environments.append(env)
        self.stdin = io.BytesIO()

    def poll(self) -> int:
        return 0

    def wait(self) -> int:
        return 0


@pytest.mark.parametrize("of_the_user", [None, "0", "1"])
def test_they_hand_over_from_gpu_to_cpu_as_the_user_said(
    of_the_user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "MLX_METAL_FAST_SYNCH"
    monkeypatch.setenv(name, of_the_user or "")
    if of_the_user is None:
        del os.environ[name]
    Started.environments = []
    monkeypatch.setattr(subprocess, "Popen", Started)
    ranks = LocalRanks.start(3, {})
    try:
        assert os.environ.get(name) == of_the_user
    finally:
        ranks.kill()
    assert [env.get(name) for env in Started.environments] == [of_the_user] * 2
