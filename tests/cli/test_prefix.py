"""`mlxserve prefix` against a small server that records its requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Run, error_line
from tests.cli.recording_server import RecordingServer


@pytest.fixture
def prefix(run: Run, monkeypatch: pytest.MonkeyPatch, server: RecordingServer) -> Run:
    """A function that runs `mlxserve prefix` against the server."""
    monkeypatch.setenv("MLXSERVE_URL", server.url)
    return lambda *args, **options: run("prefix", *args, **options)


def test_a_prefix_is_added_from_a_file_or_a_pipe(
    prefix: Run, server: RecordingServer, tmp_path: Path
) -> None:
    server.answer({"id": "rules", "num_tokens": 3})
    file = tmp_path / "rules.txt"
    file.write_text("Be brief.")
    assert prefix("add", "rules", str(file)) == (0, "rules: 3 tokens\n", "")
    prefix("add", "rules", "-", stdin="Be kind.")
    prefix("add", "rules", "--system", stdin="Be kind.")
    bodies = [body for _, _, body, _ in server.asked]
    assert server.asked[0][:2] == ("PUT", "/v1/prefixes/rules")
    assert bodies == [
        {"prompt": "Be brief."},
        {"prompt": "Be kind."},
        {"messages": [{"role": "system", "content": "Be kind."}]},
    ]


def test_prefixes_are_listed_and_removed_with_the_key_from_the_environment(
    prefix: Run, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret")
    card = {"id": "rules", "num_tokens": 3, "key": None}
    server.answer({"data": [card]})
    assert prefix("list")[1].split() == ["rules", "3", "tokens"]
    assert json.loads(prefix("list", "--json")[1]) == [card]
    assert prefix("list").err == ""
    assert prefix("remove", "a/b", "--url", f"{server.url}/v1/") == (0, "", "")
    assert server.asked[-1] == ("DELETE", "/v1/prefixes/a%2Fb", None, "Bearer secret")


def test_an_empty_list_of_prefixes_says_so(prefix: Run, server: RecordingServer) -> None:
    server.answer({"data": []})
    outcome = prefix("list")
    assert (outcome.code, outcome.out) == (0, "")
    assert "There are no prefixes." in outcome.err


def test_an_admin_sees_the_owner_of_a_prefix_and_removes_it(
    prefix: Run, server: RecordingServer
) -> None:
    server.answer({"data": [{"id": "rules", "num_tokens": 3, "key": "alice-01"}]})
    assert prefix("list")[1].split() == ["rules", "3", "tokens", "alice-01"]
    assert prefix("remove", "rules", "--key", "alice-01") == (0, "", "")
    assert server.asked[-1][:2] == ("DELETE", "/v1/prefixes/rules?key=alice-01")


def test_an_error_is_one_line(prefix: Run, server: RecordingServer, tmp_path: Path) -> None:
    server.answer({"error": {"message": "There is no prefix named 'x'."}}, 404)
    assert "There is no prefix named 'x'." in error_line(prefix("remove", "x"))
    server.answer({"error": {"message": "No valid API key was sent."}}, 401)
    assert "MLXSERVE_API_KEY" in error_line(prefix("list"))
    server.reply = (200, b"<html>")
    assert "is not mlxserve" in error_line(prefix("list"))
    assert "cannot be read" in error_line(prefix("add", "x", str(tmp_path / "none")))
    assert "prefix is empty" in error_line(prefix("add", "x"))
    unreachable = prefix("list", "--url", "http://127.0.0.1:1")
    assert "No server answers at http://127.0.0.1:1" in error_line(unreachable)
