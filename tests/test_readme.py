"""What README says is so."""

from __future__ import annotations

import re
from pathlib import Path

from mlxserve.cli.options import OPTION_PANELS
from tui.commands import readme_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_commands_of_the_chat_are_those_of_its_table() -> None:
    assert readme_table().strip() in README


def test_every_flag_that_is_named_exists() -> None:
    known = {name.replace("_", "-") for names in OPTION_PANELS.values() for name in names}
    table = README[README.index("| Flag |") : README.index("`mlxserve bench WORKLOAD`")]
    flags = set(re.findall(r"`--(?:no-)?([a-z][a-z-]+)`", table))
    assert flags
    assert flags <= known


def test_every_file_that_is_named_exists() -> None:
    paths = re.findall(r"`((?:mlxserve|metal_kernels|tui|tests|\.ci|\.github)/[\w./-]*)`", README)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    assert "pip install uv && uv run pytest" in README
    assert "\nuv run pytest\n" in (ROOT / ".ci" / "run").read_text()
