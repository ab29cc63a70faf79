"""`mlxserve use`: the model that other commands take is remembered in the configuration file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mlxserve.cli.running_servers import registered
from mlxserve.cli.use import remember
from mlxserve.core.errors import InvalidConfig
from mlxserve.system import machine
from mlxserve.system.device_memory import DeviceMemory
from tests.cli.commands import Run, error_line
from tests.memory_table import mac


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("MLXSERVE_MODEL", raising=False)
    return tmp_path / "mlxserve" / "config.toml"


def test_a_short_name_is_remembered_as_its_repository_and_said(file: Path, run: Run) -> None:
    code, said, _ = run("use", "qwen3:4b")
    assert code == 0
    assert tomllib.loads(file.read_text()) == {"model": "mlx-community/Qwen3-4B-4bit"}
    assert str(file) in said
    assert "`mlxserve pull qwen3:4b` downloads it" in said
    code, said, _ = run("use")
    assert (code, said.splitlines()[0]) == (0, f"mlx-community/Qwen3-4B-4bit ({file})")


@pytest.mark.parametrize(
    ("memory", "proposed"),
    [
        (8, "lfm2.5:2.6b (1.5 GB) suits this machine; lfm2.5:1.2b (0.7 GB) answers faster."),
        (16, "qwen3.5:4b (2.4 GB) suits this machine; lfm2.5:1.2b (0.7 GB) answers faster."),
        (24, "bonsai:27b (7.6 GB) suits this machine; qwen3.5:4b (2.4 GB) answers faster."),
        (32, "qwen3.8:27b (15.1 GB) suits this machine; qwen3.5:4b (2.4 GB) answers faster."),
    ],
)
def test_without_a_name_it_proposes_what_suits_the_machine(
    file: Path, run: Run, monkeypatch: pytest.MonkeyPatch, memory: int, proposed: str
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: mac(memory))
    monkeypatch.setattr(machine, "is_metal", lambda: True)
    assert run("use").out.splitlines()[-1].startswith(proposed)
    monkeypatch.setattr(machine, "memory", lambda: DeviceMemory(10**9, 10**9, is_metal=True))
    assert run("use").out.count("\n") == 1, "nothing suits it"


def test_a_folder_is_remembered_by_its_whole_path(
    file: Path, run: Run, model_folder: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("qwen3")  # type: ignore[operator]
    monkeypatch.chdir(folder.parent)
    assert run("use", folder.name).out.count("\n") == 1, "it is here"
    assert tomllib.loads(file.read_text()) == {"model": str(folder)}


def test_the_included_model_is_the_default_and_can_be_chosen_again(file: Path, run: Run) -> None:
    assert "mlxserve-mini, the included model" in run("use").out
    run("use", "qwen3:8b")
    assert run("use", "mlxserve-mini").code == 0
    assert tomllib.loads(file.read_text()) == {"model": "mlxserve-mini"}


def test_a_name_that_cannot_be_a_model_s_is_refused_with_suggestions(file: Path, run: Run) -> None:
    assert "Did you mean qwen3:4b" in error_line(run("use", "qwen3:4bb"))
    assert not file.exists()


@pytest.mark.parametrize("name", ["a\nport = 1", 'a"\nport = 1', "a\r\n[models.b]", "a\0b"])
def test_no_name_adds_a_line_to_the_file(file: Path, run: Run, name: str) -> None:
    assert run("use", name).code != 0
    assert not file.exists()


def test_a_server_with_another_model_is_named(file: Path, run: Run) -> None:
    with registered("http://127.0.0.1:8123", ["org/served"], needs_key=False):
        assert "The server at http://127.0.0.1:8123 keeps org/served" in run("use", "qwen3:4b").out
    with registered("http://127.0.0.1:8123", ["mlx-community/Qwen3-4B-4bit"], needs_key=False):
        assert "keeps" not in run("use", "qwen3:4b").out


def test_the_environment_goes_before_it_and_that_is_said(
    file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_MODEL", "org/other")
    assert "MLXSERVE_MODEL is set here and goes before it: org/other" in run("use", "qwen3:4b").out
    assert run("use").out.startswith("org/other (MLXSERVE_MODEL in the environment)\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", 'model = "a"\n'),
        ("# mine\nport = 1 # here\n", 'model = "a"\n# mine\nport = 1 # here\n'),
        ("port = 1\n  model = 'b'  # c\nseed = 2\n", 'port = 1\nmodel = "a"\nseed = 2\n'),
        ('[models."b"]\nmodel = "c"\n', 'model = "a"\n[models."b"]\nmodel = "c"\n'),
    ],
)
def test_every_other_line_of_the_file_stays(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(before)
    remember("a", file)
    assert file.read_text() == after


@pytest.mark.parametrize(
    "text", ["port = \n", '"model" = "b"\n', 'notes = """\nmodel = "x"\n"""\n']
)
def test_a_file_that_cannot_be_changed_safely_stays_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match="cannot be written into"):
        remember("a", file)
    assert file.read_text() == text


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "dotfiles.toml").write_text("port = 1\n")
    link = tmp_path / "config.toml"
    link.symlink_to("dotfiles.toml")
    remember('with "quotes" \u00e9', link)
    assert link.is_symlink()
    assert tomllib.loads(link.read_text()) == {"port": 1, "model": 'with "quotes" \u00e9'}


@pytest.mark.parametrize("command", [("pull", "--json"), ("use",), ("rm", "--yes")])
@pytest.mark.parametrize("name", ["--help", "--version", "-h", "--json"])
def test_what_stands_behind_two_dashes_is_a_name(
    offline: Run, command: tuple[str, ...], name: str
) -> None:
    code, out, err = offline(*command, "--", name)
    assert code != 0
    assert "Usage" not in out
    assert name in out + err
