"""Every option of the schemas is a flag with help, and flags say the same again."""

import re
import sys
from typing import Any

import pytest
import typer

from mlxserve import cli
from mlxserve.api.config import ServerConfig
from mlxserve.cli.options import OPTION_PANELS, documented_options, with_settings
from mlxserve.cli.settings import defaults_of, flags_of, types_of
from mlxserve.config import EngineConfig

SCHEMAS = (ServerConfig, EngineConfig)


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def parse(*flags: str) -> Any:
    found = []
    app = typer.Typer()
    app.command()(with_settings(*SCHEMAS)(lambda settings: found.append(settings)))
    app(list(flags), standalone_mode=False)
    return found[0]


def test_every_option_is_a_flag_with_help_in_a_panel(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlxserve", "serve", "--help"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for panel in OPTION_PANELS:
        assert f"\n{panel}:\n" in text
    for schema in SCHEMAS:
        for name in types_of(schema):
            assert re.search(rf"--{name.replace('_', '-')}\b", text), name
            assert documented_options(schema)[name], name


def test_the_panels_name_each_option_once():
    named = [name for names in OPTION_PANELS.values() for name in names]
    assert sorted(named) == sorted(name for schema in SCHEMAS for name in types_of(schema))


def test_no_flag_is_nothing_given():
    settings = parse()
    assert settings.flags == {}
    assert settings.build(EngineConfig) == EngineConfig()
    assert settings.build(ServerConfig) == ServerConfig()


def test_values_become_the_flags_that_give_them_again():
    changed = {
        "num_pages": 5,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        "gpu_memory_utilization": 0.5,
        "model": "org/name",
        "alias": ("a", "b"),
        "port": 0,
    }
    settings = parse(*flags_of(changed))
    assert settings.flags == changed
    assert settings.build(ServerConfig).alias == ("a", "b")


def test_the_defaults_of_both_schemas_are_valid_and_apart():
    assert not defaults_of(ServerConfig).keys() & defaults_of(EngineConfig).keys()
