"""`mlxserve uninstall`: every place is listed, and only what is ours is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.cli.running_servers import registered
from tests.cli.commands import Run, error_line


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's folders with something of every kind."""
    for name, folder in (
        ("HOME", "."),
        ("MLXSERVE_HOME", ".mlxserve"),
        ("XDG_CONFIG_HOME", ".config"),
        ("XDG_CACHE_HOME", ".cache"),
        ("XDG_STATE_HOME", ".local/state"),
        ("HF_HUB_CACHE", ".cache/huggingface/hub"),
        ("OLLAMA_MODELS", ".ollama"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "MLXSERVE_DISK_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


OURS = (
    ".mlxserve/chat.sqlite",
    ".mlxserve/chats/key.sqlite",
    ".mlxserve/logs/serve.log",
    ".mlxserve/exports/chat.md",
    ".mlxserve/trials.json",
    ".config/mlxserve/config.toml",
    ".config/mlxserve/keys.json",
    ".config/mlxserve/own-key.json",
    ".config/mlxserve/mcp.json",
    f".cache/mlxserve/pages/{'0a' * 16}/0a/00.page",
    ".cache/mlxserve/pages/writes.json",
    ".cache/mlxserve/gguf/x/config.json",
)
OTHERS = (".mlxserve/notes.txt", ".config/other/config.toml", ".cache/mlxserve/pages/photos/a.jpg")


def put(home: Path, *names: str) -> None:
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")


def test_the_readme_names_the_folder_of_each() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for place in OURS:
        folder = "/".join(place.split("/")[: 1 if place.startswith(".mlxserve/") else 2])
        assert f"`~/{folder}`" in readme


def test_every_place_is_listed_and_nothing_deleted(home: Path, run: Run) -> None:
    put(home, *OURS, *OTHERS)
    for flags in ((), ("--list",)):
        code, said, _ = run("uninstall", *flags)
        assert code == 0
        for place in ("chat.sqlite", "logs", "exports", "config.toml", "keys.json", "own-key.json"):
            assert f"/{place}\n" in said
        assert "cached pages of prompts" in said
        assert "uv tool uninstall mlxserve" in said
    assert all((home / name).exists() for name in (*OURS, *OTHERS))


def test_all_deletes_what_is_ours_and_nothing_else(home: Path, run: Run) -> None:
    put(home, *OURS, *OTHERS)
    assert "pass --yes" in error_line_after_list(run, "uninstall", "--all")
    assert run("uninstall", "--all", "--yes").code == 0
    assert not any((home / name).exists() for name in OURS)
    assert all((home / name).exists() for name in OTHERS)
    for name in OTHERS:
        (home / name).unlink()
    (home / ".cache/mlxserve/pages/photos").rmdir()
    put(home, *OURS)
    assert run("uninstall", "--all", "--yes").code == 0
    left = [path for path in home.rglob("*") if "mlxserve" in path.name]
    assert left == []
    assert "Nothing of mlxserve is left but the package" in run("uninstall").out


def test_models_are_deleted_only_if_that_is_asked(
    home: Path, run: Run, write_model: object
) -> None:
    folder = home / ".cache/huggingface/hub/models--org--name"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write_model(snapshot, "qwen3")  # type: ignore[operator]
    other = home / ".cache/huggingface/hub/models--org--whisper"
    put(other, "snapshots/abc/config.json")
    assert str(folder) in run("uninstall").out
    run("uninstall", "--all", "--yes")
    assert folder.exists()
    assert run("uninstall", "--all", "--models", "--yes").code == 0
    assert not folder.exists()
    assert other.exists(), "of another program"


def test_a_server_that_runs_is_stopped_first(home: Path, run: Run) -> None:
    with registered("http://127.0.0.1:8123", ["org/served"], needs_key=False):
        assert "mlxserve stop --all" in error_line_after_list(run, "uninstall", "--all", "--yes")


def test_an_agent_that_is_configured_is_named(home: Path, run: Run) -> None:
    put(home, ".claude/settings.json", ".claude/settings.json.before-mlxserve")
    assert "`mlxserve launch claude --undo` first" in run("uninstall").out


def test_a_broken_configuration_is_no_obstacle(home: Path, run: Run) -> None:
    put(home, *OURS)
    (home / ".config/mlxserve/config.toml").write_text("port = ")
    assert run("uninstall", "--all", "--yes").code == 0


@pytest.mark.parametrize("flags", [("--list", "--all"), ("--models",)])
def test_options_that_contradict_are_refused(home: Path, run: Run, flags: tuple[str, ...]) -> None:
    assert error_line(run("uninstall", *flags))


def error_line_after_list(run: Run, *command: str) -> str:
    """The error below the list."""
    code, _, error = run(*command)
    assert code == 1
    return error
