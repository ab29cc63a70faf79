"""The four places that an option's value can come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.config import ServerConfig
from mlxserve.cli.settings import OTHER_NAMES, Settings
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.option import options_of

SCHEMAS = (ServerConfig, EngineConfig)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "mlxserve").mkdir()
    return tmp_path / "mlxserve"


def read(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    return Settings.read(SCHEMAS, flags or {}, environment or {}, file)


def build_all() -> None:
    settings = read()
    settings.build(EngineConfig)
    settings.build(ServerConfig)


def test_a_flag_overrides_the_environment_which_overrides_the_file(home: Path) -> None:
    (home / "config.toml").write_text("page_size = 16\nseed = 1\nport = 1\nnum_pages = 9\n")
    settings = read(
        {"page_size": 64, "num_pages": None},
        {"MLXSERVE_PAGE_SIZE": "32", "MLXSERVE_SEED": "2", "MLXSERVE_HOME": "/x", "PATH": "/y"},
    )
    engine, server = settings.build(EngineConfig), settings.build(ServerConfig)
    assert (engine.page_size, engine.seed, server.port, engine.num_pages) == (64, 2, 1, 9)
    assert engine.scheduler == EngineConfig().scheduler
    assert settings.flags == {"page_size": 64}


def test_a_file_may_be_named_by_a_flag_or_a_variable(home: Path, tmp_path: Path) -> None:
    (home / "config.toml").write_text("seed = 1\n")
    other = tmp_path / "other.toml"
    other.write_text('alias = ["a", "b"]\nenable_prefix_caching = false\nitl_target_ms = 50\n')
    for settings in (read(file=other), read(environment={"MLXSERVE_CONFIG": str(other)})):
        assert settings.build(ServerConfig).alias == ("a", "b")
        engine = settings.build(EngineConfig)
        assert (engine.seed, engine.itl_target_ms) == (0, 50)
        assert not engine.scheduler.enable_prefix_caching


def test_a_variable_is_read_as_its_options_type() -> None:
    environment = {
        "MLXSERVE_ENABLE_PREFIX_CACHING": "False",
        "MLXSERVE_DISABLE_LOG_STATS": "1",
        "MLXSERVE_GPU_MEMORY_UTILIZATION": "0.5",
        "MLXSERVE_NUM_PAGES": "7",
        "MLXSERVE_ALIAS": "a, b,",
        "MLXSERVE_MODEL": "org/name",
        "MLXSERVE_SEED": "",
    }
    settings = read(environment=environment)
    engine = settings.build(EngineConfig)
    assert (engine.scheduler.enable_prefix_caching, engine.disable_log_stats) == (False, True)
    assert (engine.gpu_memory_utilization, engine.num_pages) == (0.5, 7)
    assert (engine.model, engine.seed) == ("org/name", 0)
    assert settings.build(ServerConfig).alias == ("a", "b")


def test_options_without_a_flag_are_set_in_a_table_or_by_the_environment(home: Path) -> None:
    (home / "config.toml").write_text("[tuning]\nmax_overtakes = 3\nbody_timeout = 5\n")
    settings = read(environment={"MLXSERVE_TUNING_BODY_TIMEOUT": "7"})
    assert settings.build(EngineConfig).scheduler.max_overtakes == 3
    assert settings.build(ServerConfig).body_timeout == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seq = 3\n", "Did you mean max_num_seqs"),
        ("zzz = 3\n", "See `mlxserve serve --help-all`"),
        ("[engine]\nseed = 1\n", "no option 'engine'"),
        ("seed = \n", "cannot be read"),
        ("seed = 'x'\n", r"seed must be a whole number.*set in .*config.toml"),
        ("port = 70000\n", r"port must be a whole number from 0 to 65535.*config.toml"),
        ("alias = 'x'\n", "alias must be a list"),
        ("host = 3\n", "host must be text"),
        ("max_overtakes = 3\n", r"max_overtakes is set in the table \[tuning\]"),
        ("[tuning]\nseed = 3\n", r"\[tuning\]: seed is set outside the table"),
        ("[tuning]\nmax_overtake = 3\n", r"\[tuning\]: .*Did you mean max_overtakes"),
        ("[tuning]\nmax_overtakes = 'x'\n", r"max_overtakes must be .*config.toml, \[tuning\]"),
        ("tuning = 3\n", "tuning must be a table"),
    ],
)
def test_a_mistake_in_the_file_names_the_file_and_the_option(
    home: Path, text: str, words: str
) -> None:
    (home / "config.toml").write_text(text)
    with pytest.raises(InvalidConfig, match=words):
        build_all()


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    for variable, value, words in [
        ("MLXSERVE_MAX_NUM_SEQ", "3", "MLXSERVE_MAX_NUM_SEQ .*max_num_seqs"),
        ("MLXSERVE_SEED", "x", r"seed must be a whole number.* got 'x' \(set by MLXSERVE_SEED\)"),
        ("MLXSERVE_DISABLE_LOG_STATS", "maybe", "must be true or false"),
        ("MLXSERVE_DISK_CACHE_SIZE", "much", "must be a number"),
        ("MLXSERVE_MAX_OVERTAKES", "3", "MLXSERVE_TUNING_MAX_OVERTAKES in the environment"),
        ("MLXSERVE_TUNING_SEED", "3", "seed is set outside"),
        ("MLXSERVE_TUNING_MAX_OVERTAKES", "x", "max_overtakes must be a whole number"),
        ("MLXSERVE_PAGE_SIZE", "7", r"page_size must be one of .*set by MLXSERVE_PAGE_SIZE"),
    ]:
        with pytest.raises(InvalidConfig, match=words):
            read(environment={variable: value}).build(EngineConfig)


def test_a_rule_about_two_options_names_where_the_one_to_change_was_set(home: Path) -> None:
    (home / "config.toml").write_text("max_num_batched_tokens = 8\n")
    with pytest.raises(InvalidConfig, match=r"max_num_seqs \(64\).*set in .*config.toml"):
        build_all()


def test_a_mistake_in_a_flag_names_the_flag() -> None:
    with pytest.raises(InvalidConfig, match=r"^--page-size must be one of .*got 7$"):
        read({"page_size": 7}).build(EngineConfig)


def test_a_model_that_is_no_text_names_its_file(home: Path) -> None:
    (home / "config.toml").write_text("model = 3\n")
    with pytest.raises(InvalidConfig, match=r"model must be non-empty text, got 3 .*config.toml"):
        read().models()


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read(file=tmp_path / "none.toml")


def test_every_variable_that_the_code_reads_is_accepted() -> None:
    """Or the command would refuse to start where one of them is set."""
    root = Path(__file__).parents[2]
    known = {
        f"MLXSERVE_{'TUNING_' * option.declared.is_tuning}{option.name.upper()}"
        for schema in SCHEMAS
        for option in options_of(schema)
    }
    for folder in ("mlxserve", "metal_kernels", "tui", "tests"):
        for file in (root / folder).rglob("*.py"):
            found = re.findall(r"environ[^\n]*\W(MLXSERVE_[A-Z_]+)", file.read_text())
            assert set(found) <= known | OTHER_NAMES, file


TABLES = """
max_num_seqs = 4
seed = 1

[models."org/coder"]
aliases = ["coder"]
keep_alive = "1h"
max_num_seqs = 8

[models.small]
model = "~/small"
keep_alive = 30
preload = true
seed = 7
"""


def models_of(home: Path, flags: Mapping[str, Any] | None = None, **environment: str) -> list[Any]:
    (home / "config.toml").write_text(TABLES)
    variables = {f"MLXSERVE_{name.upper()}": value for name, value in environment.items()}
    return read(flags, variables).models()


def test_without_tables_the_only_model_is_that_of_the_options() -> None:
    [one] = read({"model": "org/name", "seed": 3}).models()
    assert (one.config.model, one.config.seed, one.is_named) == ("org/name", 3, True)
    [one] = read().models()
    assert one.config == EngineConfig()


def test_a_table_goes_before_the_file_and_flags_and_the_environment_before_a_table(
    home: Path,
) -> None:
    coder, small = models_of(home)
    assert (coder.config.model, small.config.model) == ("org/coder", "~/small")
    assert (coder.config.scheduler.max_num_seqs, small.config.scheduler.max_num_seqs) == (8, 4)
    assert (coder.config.seed, small.config.seed) == (1, 7)
    assert (coder.options.aliases, coder.options.keep_alive) == (("coder",), "1h")
    assert (coder.name, small.name, small.options.preload) == (None, "small", True)
    assert small.options.keep_alive == "30"
    assert not coder.is_named
    coder, small = models_of(home, {"max_num_seqs": 2}, seed="9")
    assert (coder.config.scheduler.max_num_seqs, small.config.seed) == (2, 9)


def test_adapters_are_those_of_the_first_model_or_of_a_table(home: Path) -> None:
    first, second = models_of(home, {"adapter": ("a=b",)})
    assert (first.config.adapters, second.config.adapters) == ({"a": "b"}, {})
    (home / "config.toml").write_text(
        'adapter = ["of-file=x"]\n[models.one]\n[models.two]\nadapter = ["c=d", "e=f=g"]\n'
    )
    first, second = read().models()
    assert (first.config.adapters, second.config.adapters) == (
        {"of-file": "x"},
        {"c": "d", "e": "f=g"},
    )
    assert read({"adapter": ("a=b",)}).models()[1].config.adapters == {"c": "d", "e": "f=g"}


def test_a_draft_model_is_that_of_the_first_model_or_of_a_table(home: Path) -> None:
    first, second = models_of(home, {"draft_model": "a/b"})
    assert (first.config.draft_model, second.config.draft_model) == ("a/b", None)
    (home / "config.toml").write_text('[models.one]\n[models.two]\ndraft_model = "c/d"\n')
    assert [model.config.draft_model for model in read().models()] == [None, "c/d"]


def test_named_models_come_first_with_their_tables(home: Path) -> None:
    found = models_of(home, {"model": ("org/other", "small")})
    assert [(one.config.model, one.is_named) for one in found] == [
        ("org/other", True),
        ("~/small", True),
        ("org/coder", False),
    ]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("models = 3", "models must be tables, one for each model"),
        ("[models]\nsmall = 3", "models must be tables, one for each model"),
        ("[models.small]\nmax_num_seq = 3", r"\[models.\"small\"\]: there is no option"),
        ("[models.small]\nport = 3", "there is no option 'port'"),
        ("[models.small]\nmax_num_seqs = 0", r"at least 1, got 0 \(set in .*small"),
        ('[models.small]\nkeep_alive = "soon"', r"keep_alive must be .* \(set in .*small"),
    ],
)
def test_a_bad_table_is_refused_with_its_name(home: Path, table: str, says: str) -> None:
    (home / "config.toml").write_text(table)
    with pytest.raises(InvalidConfig, match=says):
        read().models()
