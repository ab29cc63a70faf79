"""`mlxserve embed` against a small server that records its requests."""

from __future__ import annotations

import json

import pytest

from tests.cli.commands import Run, error_line
from tests.cli.recording_server import RecordingServer

REPLY = {
    "data": [
        {"id": "small", "index": 1, "embedding": [0.5, 1]},
        {"id": "large", "index": 0, "embedding": [0.25, 0]},
    ]
}


@pytest.mark.parametrize(
    ("arguments", "stdin"), [(("one", "two"), ""), ((), "one\n\ntwo\n")], ids=["arguments", "pipe"]
)
def test_each_text_gets_a_line(
    run: Run,
    server: RecordingServer,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    stdin: str,
) -> None:
    monkeypatch.setenv("MLXSERVE_URL", server.url)
    server.answer(REPLY)
    code, out, _ = run("embed", *arguments, stdin=stdin)
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [[0.25, 0], [0.5, 1]]
    assert [path for _, path, _, _ in server.asked] == ["/v1/models", "/v1/embeddings"]
    assert server.asked[-1][2] == {"model": "small", "input": ["one", "two"]}
    run("embed", "one", "-m", "mine")
    assert server.asked[-1][2] == {"model": "mine", "input": ["one"]}


def test_no_text_is_a_mistake(run: Run) -> None:
    assert "There is no text" in error_line(run("embed"))
    assert "There is no text" in error_line(run("embed", stdin=None))
    assert "stdin is not text" in error_line(run("embed", stdin=b"\0\1"))


def test_a_text_that_is_not_unicode_is_sent_with_the_replacement_character(
    run: Run, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of an argument that are not UTF-8 are lone surrogates in Python."""
    monkeypatch.setenv("MLXSERVE_URL", server.url)
    server.answer(REPLY)
    code, _, _ = run("embed", "a\udcffb", "-m", "mine")
    assert code == 0
    assert server.asked[-1][2] == {"model": "mine", "input": ["a\ufffdb"]}
