"""The command itself: version, imports, and how mistakes are reported."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer import Context

from mlxserve.cli.commands import app
from mlxserve.cli.running_servers import registered
from mlxserve.core.version import __version__
from tests.cli.commands import Run, error_line, mlxserve, python


def test_version_prints_the_version(run: Run) -> None:
    assert mlxserve("--version") == (0, f"mlxserve {__version__}\n", "")
    assert run("-V") == run("--version")


def test_version_imports_neither_httpx_nor_the_commands() -> None:
    script = (
        "import sys\n"
        "from mlxserve.cli import main\n"
        "sys.argv = ['mlxserve', '--version']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    heavy = {'httpx', 'typer', 'pydantic', 'psutil', 'mlxserve.cli.commands'}\n"
        "    print(sorted(heavy & sys.modules.keys()))\n"
    )
    assert python("-c", script).out.splitlines() == [f"mlxserve {__version__}", "[]"]


@pytest.mark.parametrize("command", [(), ("serve",), ("key", "create")])
def test_h_is_help(command: tuple[str, ...], run: Run) -> None:
    assert run(*command, "-h") == run(*command, "--help")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ls", "models"),
        ("list", "models"),
        ("status", "ps"),
        ("download", "pull"),
        ("delete", "rm"),
    ],
)
def test_a_command_is_known_by_the_names_of_other_tools(name: str, ours: str, run: Run) -> None:
    outcome = run(name, "--help")
    assert outcome.code == 0
    assert outcome.out.partition("\n")[2] == run(ours, "--help").out.partition("\n")[2]


@pytest.mark.parametrize("command", [(), ("serve",), ("key", "create"), ("bench",)])
def test_help_is_a_command_too(command: tuple[str, ...], run: Run) -> None:
    assert run("help", *command).code == 0
    shown, usual = run("help", *command).out, run(*command, "--help").out
    assert shown.partition("\n")[2] == usual.partition("\n")[2], "all but the program's name"
    assert run("help", "fly").code == 2


def test_no_commands_help_has_types_of_python_or_sentences_that_are_cut() -> None:
    helps = dict(_helps("mlxserve", typer.main.get_command(app)))
    assert "Usage: mlxserve key create [OPTIONS] NAME\n" in helps["mlxserve key create"]
    assert len(helps) > 40
    for text in helps.values():
        signs = ("{", "list[", "<str>", "<int", "<float", "required]")
        assert not [sign for sign in signs if sign in text], text
        rows = text.partition("\nCommands:")[2].splitlines()
        assert not [row for row in rows if row.endswith("...")], text


def _helps(path: str, command: Any) -> Iterator[tuple[str, str]]:
    """Yield the words of a command and of all that are below it, each with its help."""
    yield path, command.get_help(Context(command, info_name=path))
    for name, below in getattr(command, "commands", {}).items():
        yield from _helps(f"{path} {name}", below)


def test_help_imports_neither_mlx_nor_a_server() -> None:
    code = (
        "import sys; sys.argv = ['mlxserve', '--help']\n"
        "from mlxserve.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'uvicorn', 'starlette', 'textual'}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))\n"
    )
    outcome = python("-c", code)
    assert outcome.out.endswith("imported: []\n"), outcome


def test_show_imports_neither_all_of_transformers_nor_models_of_mlx_lm() -> None:
    code = (
        "import sys; sys.argv = ['mlxserve', 'show', 'mlxserve-mini']\n"
        "from mlxserve.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'transformers.dependency_versions_check', 'mlx_lm.generate', 'mlx.nn', 'uvicorn'}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))\n"
    )
    outcome = python("-c", code)
    assert "Template" in outcome.out, outcome
    assert outcome.out.endswith("imported: []\n"), outcome


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--page-size", "7"], "--page-size must be one of"),
        (["serve", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization must"),
        (["serve", "--model", "./no such folder"], "no such folder"),
        (["serve", "--host", "0.0.0.0"], "mlxserve key create"),
        (["serve", "--port", "65536"], "port must be a whole number from 0 to 65535"),
        (["serve", "--log-level", "x"], "--log-level must be one of"),
        (["serve", "--config", "/nonexistent.toml"], "cannot be read"),
        (["serve", "--host", "203.0.113.7", "--api-key-file", "/nonexistent"], "cannot be read"),
        (["serve", "--allowed-origin", "x"], "not an origin"),
        (["run", "--model", "./no such folder", "hi"], "no such folder"),
        (["run", ""], "There is no prompt"),
        (["run"], "There is no prompt"),
        (["chat", "--url", "http://127.0.0.1:1", "--num-pages", "5"], "--num-pages"),
        (["chat", "--page-size", "7"], "--page-size must be one of"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(args: list[str], words: str, run: Run) -> None:
    flags = ("--port", "0") if args[0] == "serve" and "--port" not in args else ()
    assert words in error_line(run(*args, *flags))


def test_a_users_mistake_shows_no_traceback() -> None:
    assert "no such folder" in error_line(
        mlxserve("serve", "--port", "0", "--model", "./no such folder")
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--port", "x"], "Invalid value for '--port': give a whole number."),
        (["serve", "--no-such-flag"], "No such option: --no-such-flag"),
        (["fly"], "No such command 'fly'"),
        (["version"], "Run `mlxserve --version`."),
        (["upgrade"], "uv tool install --reinstall ."),
        (["config", "set", "a", "b"], "~/.config/mlxserve/config.toml"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(args: list[str], words: str, run: Run) -> None:
    outcome = run(*args)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err


def test_an_address_of_another_machine_is_one_clear_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "k" * 32)
    outcome = run("serve", "--host", "203.0.113.7")
    assert "Cannot listen on 203.0.113.7 port 8000" in error_line(outcome)


def test_a_port_of_a_server_of_ones_own_says_which_one(run: Run) -> None:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        port = own.getsockname()[1]
        with registered(f"http://127.0.0.1:{port}", ["org/small"], needs_key=False):
            line = error_line(run("serve", "--port", str(port)))
    assert f"A server of yours with org/small uses port {port} already" in line
    assert f"`mlxserve stop {port}`" in line


def test_a_port_in_use_is_one_clear_error(run: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = error_line(run("serve", "--port", str(port)))
    assert f"Port {port} on 127.0.0.1 is in use" in line
    assert "--port" in line
