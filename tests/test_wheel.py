"""The wheel: what it contains, and that every command works from it in a clean environment."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import typer

from mlxserve.bench.cli import app as bench_app
from mlxserve.cli.commands import app
from mlxserve.core.version import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PACKAGES = ("metal_kernels", "mlxserve", "tests", "tui")


@dataclass(frozen=True)
class Installation:
    """An environment that has the wheel and its dependencies, and cannot see the checkout."""

    python: Path
    folder: Path  # an empty one, to run in

    def run(self, *command: str | Path) -> str:
        """Standard output of a program; asserts that it succeeds."""
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=_environment(MLXSERVE_HOME=str(self.folder), HF_HUB_OFFLINE="1"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def mlxserve(self, *arguments: str) -> str:
        return self.run(self.python.with_name("mlxserve"), *arguments)


def _environment(**changes: str) -> Mapping[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "MLXSERVE")) and name != "VIRTUAL_ENV"
    }
    return {**kept, **changes}


def _uv(*arguments: str | Path) -> None:
    uv = shutil.which("uv")
    assert uv, "the README's commands need uv"
    subprocess.run([uv, *arguments], cwd=ROOT, env=_environment(), check=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _uv("build", "--quiet", "--wheel", "--out-dir", folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def files(wheel: Path) -> Mapping[str, bytes]:
    """Each file of the wheel and its content."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("environment")
    python = folder / "venv" / "bin" / "python"
    _uv("venv", "--quiet", "--python", sys.executable, folder / "venv")
    _uv("pip", "install", "--quiet", "--python", python, wheel)
    empty = folder / "empty"
    empty.mkdir()
    return Installation(python, empty)


def test_every_file_of_the_packages_is_included(files: Mapping[str, bytes]) -> None:
    sources = {
        file.relative_to(ROOT).as_posix()
        for package in ("metal_kernels", "mlxserve", "tui")
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert sources - files.keys() == set()
    others = {name.split("/")[0] for name in files.keys() - sources}
    assert others == {f"mlxserve-{__version__}.dist-info"}


def test_every_module_that_the_wheel_imports_is_in_the_wheel(files: Mapping[str, bytes]) -> None:
    missing = [
        f"{file} imports {module}"
        for file, content in files.items()
        if file.endswith(".py")
        for module in _imported(content)
        if not {f"{module}.py", f"{module}/__init__.py"} & files.keys()
    ]
    assert missing == []


def _imported(content: bytes) -> Iterator[str]:
    """Paths of the modules of ours that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(content)):
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in PACKAGES:
                yield name.replace(".", "/")


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all commands below it."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*path, name))


COMMANDS = [
    *_commands(typer.main.get_command(app)),
    *_commands(typer.main.get_command(bench_app), ("bench",)),
]


# Asks for the help of each command in one process: each process takes two seconds to import them.
_HELP = """
import contextlib, io, json, sys
from mlxserve.cli import main

shown = {}
for words in sys.argv[1:]:
    sys.argv = [*words.split(), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    shown[words] = out.getvalue()
print(json.dumps(shown))
"""


def test_every_command_has_help(installation: Installation) -> None:
    commands = [" ".join(("mlxserve", *words)) for words in dict.fromkeys(COMMANDS)]
    shown = json.loads(installation.run(installation.python, "-c", _HELP, *commands))
    assert len(commands) > 40
    assert [words for words in commands if words not in shown[words]] == []
    assert "mlxserve serve" in installation.mlxserve("serve", "--help")


def test_the_library_is_the_installed_one(installation: Installation) -> None:
    code = "import mlxserve; from mlxserve import LLM; print(mlxserve.__file__, LLM.__name__)"
    file, name = installation.run(installation.python, "-c", code).split()
    assert Path(file).is_relative_to(installation.python.parents[1])
    assert name == "LLM"


def test_a_question_is_answered(installation: Installation) -> None:
    question = "Remember the code word plum-42. What is the code word?"
    assert "plum-42" in installation.mlxserve("run", "--num-pages", "64", question)


def test_the_embedded_model_is_listed(installation: Installation) -> None:
    assert "mlxserve-mini" in installation.mlxserve("models")


@pytest.mark.long
def test_the_doctor_finds_nothing_broken(installation: Installation) -> None:
    assert "mlx" in installation.mlxserve("doctor")
