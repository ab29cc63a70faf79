"""`mlxserve uninstall`: every place is listed, and only what is ours is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.cli.running_servers import registered
from mlxserve.history.chat_file import open_file
from mlxserve.history.export import Format, export
from mlxserve.history.messages import ChatRecord
from mlxserve.system.files import is_marked, make_marked_folder
from tests.cli.commands import Run, error_line
from tui.home import Home


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
    ".mlxserve/templates.json",
    ".mlxserve/chunk-times.json",
    ".config/mlxserve/config.toml",
    ".config/mlxserve/keys.json",
    ".config/mlxserve/own-key.json",
    ".config/mlxserve/mcp.json",
    f".cache/mlxserve/pages/{'0a' * 16}/0a/00.page",
    ".cache/mlxserve/pages/writes.json",
    ".cache/mlxserve/gguf/x/config.json",
)
OTHERS = (".mlxserve/notes.txt", ".config/other/config.toml", ".cache/mlxserve/pages/photos/a.jpg")


MARKED = ("chats", "exports", "logs", "servers", "synthetic")


def put(home: Path, *names: str) -> None:
    """Write files, and make the folders of them that mlxserve makes as it does."""
    for name in names:
        if name.startswith(".mlxserve/") and name.split("/")[1] in MARKED:
            make_marked_folder((home / name).parent)
        if "/gguf/" in name:
            make_marked_folder(home / ".cache/mlxserve/gguf")
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")


@pytest.mark.parametrize("name", [*MARKED, "models"])
def test_a_folder_of_one_of_our_names_that_we_did_not_make_stays(
    home: Path, run: Run, name: str
) -> None:
    """~/.mlxserve may be a link to ~/Documents, with chats of somebody else in it (N7)."""
    documents = home / "Documents"
    (documents / name).mkdir(parents=True)
    (documents / name / "keep.txt").write_text("mine")
    (home / ".mlxserve").symlink_to(documents)
    put(home, ".mlxserve/chat.sqlite")
    code, said, _ = run("uninstall", "--all", "--models", "--yes")
    assert code == 0
    assert (documents / name / "keep.txt").read_text() == "mine"
    assert not (documents / "chat.sqlite").exists()
    assert name == "models" or f"/{name} was not made by mlxserve" in said


def test_a_folder_that_was_there_before_we_wrote_into_it_stays(home: Path, run: Run) -> None:
    chats = home / ".mlxserve/chats"
    chats.mkdir(parents=True)
    (chats / "keep.txt").write_text("mine")
    make_marked_folder(chats)
    assert run("uninstall", "--all", "--yes").code == 0
    assert (chats / "keep.txt").exists()


def test_a_link_to_a_folder_that_we_made_is_removed_and_not_followed(home: Path, run: Run) -> None:
    made, link = home / "elsewhere", home / ".mlxserve/chats"
    make_marked_folder(made)
    (made / "keep.txt").write_text("mine")
    link.parent.mkdir()
    link.symlink_to(made)
    assert run("uninstall", "--all", "--yes").code == 0
    assert not link.is_symlink()
    assert (made / "keep.txt").exists()


def test_everything_that_makes_a_folder_marks_it(home: Path, run: Run) -> None:
    Home.from_environment().create()
    export(
        ChatRecord(id=1, title="t", created_at=0.0, updated_at=0.0, leaf_id=None),
        (),
        Format.JSON,
        home / ".mlxserve/exports/t.json",
    )
    open_file(home / ".mlxserve/chats/key.sqlite").close()
    with registered("http://127.0.0.1:8123", ["org/served"], needs_key=False):
        folders = [path for path in (home / ".mlxserve").iterdir() if path.is_dir()]
        assert {path.name for path in folders} == {"chats", "exports", "logs", "servers"}
        assert all(map(is_marked, folders))
    assert run("uninstall", "--all", "--yes").code == 0
    assert not (home / ".mlxserve").exists()


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
