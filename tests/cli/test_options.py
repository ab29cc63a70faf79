"""Every option of the configs is a flag with help, and a row of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from mlxserve.api.config import ServerConfig
from mlxserve.cli.options import SCHEMAS, options_table, tuning_table, with_settings
from mlxserve.cli.settings import flags_of
from mlxserve.core.config import EngineConfig
from mlxserve.core.option import options_of
from tests.cli.commands import Run

TUNING = Path(__file__).parents[2] / "docs" / "tuning.md"


@pytest.fixture(autouse=True)
def empty_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def parse(*flags: str) -> Any:
    found: list[Any] = []
    app = typer.Typer()
    app.command()(with_settings(*SCHEMAS)(lambda settings: found.append(settings)))
    app(list(flags), standalone_mode=False)
    return found[0]


def test_help_shows_each_flag_with_its_unit_text_and_default_in_its_panel(run: Run) -> None:
    code, text, _ = run("serve", "--help-all")
    assert code == 0
    scheduling = " ".join(text[text.index("\nScheduling:\n") :].split())
    assert re.search(r"--max-num-seqs <requests> Most requests [^-]* \[default: 64\]", scheduling)
    assert re.search(r"--page-tail <copy\|recompute> Where [^-]* \[default: copy\]", scheduling)
    for schema in SCHEMAS:
        for option in options_of(schema):
            flag = re.search(rf"--{option.name.replace('_', '-')}\b", text)
            assert (flag is None) == option.declared.is_tuning, option.name
            assert f"\n{option.declared.panel}:\n" in text


@pytest.mark.parametrize("command", ["serve", "run", "chat", "models"])
def test_help_is_short_and_leads_to_all_options(command: str, run: Run) -> None:
    code, text, _ = run(command, "--help")
    assert code == 0
    assert "--help-all" in text
    assert "--model" in text
    assert "--page-tail" not in text
    assert len(text.splitlines()) <= 50
    if command != "models":
        assert f"\n  mlxserve {command}" in text[text.index("\nExamples:\n") :]


def test_without_flags_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLXSERVE_DISK_CACHE_SIZE", "MLXSERVE_TUNING_TRIAL_PROCESS"):  # set for all tests
        monkeypatch.delenv(name)
    settings = parse()
    assert settings.flags == {}
    assert settings.build(EngineConfig) == EngineConfig()
    assert settings.build(ServerConfig) == ServerConfig()


def test_values_become_the_flags_that_give_them_again() -> None:
    changed = {
        "num_pages": 5,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        "gpu_memory_utilization": 0.5,
        "page_tail": "recompute",
        "model": ("org/name", "org/other"),
        "alias": ("a", "b"),
        "port": 0,
    }
    settings = parse(*flags_of(changed))
    assert settings.flags == changed
    assert settings.build(ServerConfig).alias == ("a", "b")
    assert settings.build(EngineConfig).model == "org/name"


def test_a_row_of_the_table_has_flag_default_and_help() -> None:
    rows = options_table().splitlines()
    [row] = [row for row in rows if row.startswith("| `--preemption-mode ")]
    assert row.startswith(r"| `--preemption-mode <recompute\|swap>` | recompute | What happens ")


def test_the_documentation_has_the_tables_as_they_are_printed() -> None:
    """`python -m mlxserve.cli.options` prints them."""
    text = TUNING.read_text(encoding="utf-8")
    for name, printed in (("options", options_table()), ("tuning", tuning_table())):
        _, _, rest = text.partition(f"<!-- {name}: begin -->\n")
        tables, _, _ = rest.partition(f"<!-- {name}: end -->\n")
        assert tables == printed, name
