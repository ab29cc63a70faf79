"""The command against a small server of the test's own."""

import io
import json
import sys

import pytest

from mlxserve import cli


@pytest.fixture
def run(monkeypatch, capsys, server):
    monkeypatch.setenv("MLXSERVE_URL", server.url)
    monkeypatch.delenv("MLXSERVE_API_KEY", raising=False)

    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", ["mlxserve", "prefix", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def test_a_prefix_is_added_from_a_file_or_a_pipe(run, server, tmp_path):
    server.answer({"id": "rules", "num_tokens": 3})
    file = tmp_path / "rules.txt"
    file.write_text("Be brief.")
    assert run("add", "rules", str(file)) == (0, "rules: 3 tokens\n", "")
    run("add", "rules", "-", stdin="Be kind.")
    run("add", "rules", "--system", stdin="Be kind.")
    bodies = [body for _, _, body, _ in server.asked]
    assert server.asked[0][:2] == ("PUT", "/v1/prefixes/rules")
    assert bodies == [
        {"prompt": "Be brief."},
        {"prompt": "Be kind."},
        {"messages": [{"role": "system", "content": "Be kind."}]},
    ]


def test_prefixes_are_listed_and_removed_with_the_key_from_the_environment(
    run, server, monkeypatch
):
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret")
    server.answer({"data": [{"id": "rules", "num_tokens": 3}]})
    assert run("list")[1].split() == ["rules", "3", "tokens"]
    assert json.loads(run("list", "--json")[1]) == [{"id": "rules", "num_tokens": 3}]
    assert run("remove", "a/b", "--url", f"{server.url}/v1/") == (0, "", "")
    assert server.asked[-1] == ("DELETE", "/v1/prefixes/a%2Fb", None, "Bearer secret")


def test_an_error_is_one_line(run, server, tmp_path):
    server.answer({"error": {"message": "There is no prefix named 'x'."}}, 404)
    refused = run("remove", "x")
    assert "There is no prefix named 'x'." in refused[2]
    server.answer({"error": {"message": "No valid API key was sent."}}, 401)
    locked = run("list")
    assert "MLXSERVE_API_KEY" in locked[2]
    server.reply = (200, b"<html>")
    foreign = run("list")
    assert "is not mlxserve" in foreign[2]
    missing = run("add", "x", str(tmp_path / "none"))
    assert "cannot be read" in missing[2]
    empty = run("add", "x")
    assert "prefix is empty" in empty[2]
    nobody = run("list", "--url", "http://127.0.0.1:1")
    assert "No server answers at http://127.0.0.1:1" in nobody[2]
    for code, out, err in (refused, locked, foreign, missing, empty, nobody):
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
