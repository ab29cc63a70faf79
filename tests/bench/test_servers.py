"""mlx-lm's server gets a folder that it can read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest

from mlxserve.bench import servers
from mlxserve.hub.embedded import model_path


def test_mlx_lm_gets_the_folder_of_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    @contextlib.contextmanager
    def child(
        _name: str, command: list[str], _ready: str, environment: Mapping[str, str]
    ) -> Iterator[tuple[str, servers.Child]]:
        assert environment == {"A": "b"}
        commands.append(command)
        yield "http://127.0.0.1:9", servers.Child(1, 2.0, 1.5)

    monkeypatch.setattr(servers, "run_child", child)
    with servers.mlx_lm_server("mlxserve-mini", {"A": "b"}) as server:
        assert server.model == str(model_path())
        assert (server.start_seconds, server.start_cpu_seconds, server.process_id) == (2.0, 1.5, 1)
    assert commands[0][-2:] == ["--model", str(model_path())]
