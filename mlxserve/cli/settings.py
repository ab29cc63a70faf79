"""Settings: the values of options, from flags, the environment and a file.

    flag  >  MLXSERVE_NAME in the environment  >  the file  >  the default

The file is TOML with one `name = value` per option, named like the configs' fields; flags are spelled
with dashes. A table for a model goes before what the file says for all of them:

    max_num_seqs = 16

    [models."mlx-community/Qwen3.5-4B-MLX-4bit"]
    aliases = ["coder"]
    max_model_len = 32768

    [tuning]
    max_overtakes = 2

Options that few people need have no flag: they are set in the table `tuning` or by MLXSERVE_TUNING_NAME.
An unknown name is an error: a misspelled option that is silently ignored is hard to find.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlxserve.api.config import ModelOptions
from mlxserve.core.config import EngineConfig, config_home
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.option import NamedOption, Options, options_of, unknown_option

PREFIX = "MLXSERVE_"
_TABLES = "models"  # the name of the models' tables in the file
# The name of the table of options that have no flag.
_TUNING = "tuning"
# Options that are the first model's, unless a table has them.
_OF_FIRST = frozenset({"adapter", "draft_model"})
# Variables of the same prefix that are not options: secrets, folders, what is read before options
# are, and settings of our tests.
OTHER_NAMES = frozenset(
    {
        "MLXSERVE_API_KEY",
        "MLXSERVE_BLAS",
        "MLXSERVE_CONFIG",
        "MLXSERVE_HOME",
        "MLXSERVE_MACHINE_EXAMPLES",
        "MLXSERVE_URL",
    }
)

T = TypeVar("T", bound=Options)


@dataclass(frozen=True, slots=True)
class Given:
    """A value and its source, which is empty for a flag."""

    value: Any
    source: str
    is_of_file: bool = False


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model to serve.

    is_named: by --model, and not only by a table of the file
    name: in the API, if a table gives it one of its own
    """

    config: EngineConfig
    options: ModelOptions
    is_named: bool
    name: str | None = None


class Settings:
    """The values given for the options of some configs."""

    def __init__(
        self,
        flags: Mapping[str, Any],
        values: Mapping[str, Given],
        file: Path | None,
        tables: Mapping[str, Mapping[str, Given]],
    ) -> None:
        """file: named by a flag.

        tables: of models in the file that was read, by their names
        """
        self.flags = flags
        self.file = file
        self._given = values
        self._tables = tables

    @classmethod
    def read(
        cls,
        schemas: Iterable[type[Options]],
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        file: Path | None = None,
    ) -> Settings:
        """Collect the values; `flags` that are None were not used. Raises InvalidConfig."""
        known = {option.name: option for schema in schemas for option in options_of(schema)}
        flags = {name: value for name, value in flags.items() if value is not None}
        content = _content(_chosen(file, environment))
        values = {
            **_from_file(content, known),
            **_from_environment(environment, known),
            **{name: Given(value, "") for name, value in flags.items()},
        }
        return cls(flags, values, file, _tables(content))

    def has(self, name: str) -> bool:
        """True if any source sets the option."""
        return name in self._given

    def with_model(self, name: str) -> Settings:
        """Return the settings as if --model named this model.

        Raises InvalidConfig if it does already.
        """
        if "model" in self.flags:
            raise InvalidConfig(
                f"The model is named twice: {name!r} and --model. Leave one of them out."
            )
        flags = {**self.flags, "model": name}
        values = {**self._given, "model": Given(name, "")}
        return Settings(flags, values, self.file, self._tables)

    def build(self, schema: type[T]) -> T:
        """Build the config. Raises InvalidConfig that names the value's source."""
        return _built(schema, self._given)

    def models(self) -> list[ModelSettings]:
        """List the models to serve: those of --model, else the first table's, then the tables'.

        Raises InvalidConfig.
        """
        named = several(self._given["model"].value) if self.has("model") else ()
        if not named and not self._tables:
            return [ModelSettings(self.build(EngineConfig), ModelOptions(), is_named=True)]
        return [
            self._model(name, is_named=name in named, is_first=number == 0)
            for number, name in enumerate({**dict.fromkeys(named), **self._tables})
        ]

    def other_model(self, name: str) -> ModelSettings:
        """Return an additional model to serve. Raises InvalidConfig."""
        return self._model(name, is_named=False, is_first=False)

    def _model(self, name: str, *, is_named: bool, is_first: bool) -> ModelSettings:
        table = self._tables.get(name, {})
        of_all = {
            key: value for key, value in self._given.items() if is_first or key not in _OF_FIRST
        }
        over = {key: value for key, value in of_all.items() if not value.is_of_file}
        source = self._given["model"].source if is_named else ""
        values = {**of_all, **table, **over, "model": table.get("model", Given(name, source))}
        return ModelSettings(
            _built(EngineConfig, values),
            _built(ModelOptions, table),
            is_named,
            name if "model" in table else None,
        )


def _built(schema: type[T], given_values: Mapping[str, Given]) -> T:
    """Build a config. Raises InvalidConfig that names the value's source."""
    values = {
        option.name: _as_declared(given_values[option.name].value, option)
        for option in options_of(schema)
        if option.name in given_values
    }
    if "model" in values and (named := several(values["model"])):
        values["model"] = named[0]
    try:
        return schema().with_options(**values)
    except InvalidConfig as error:
        name = error.option or ""
        value = given_values.get(name)
        if value is None:
            raise
        if value.source:
            raise InvalidConfig(f"{error} ({value.source})", option=name) from error
        said = str(error)
        if not said.startswith(f"{name} "):
            raise
        # In the words of who typed it.
        raise InvalidConfig(flag_of(name) + said.removeprefix(name), option=name) from error


def _as_declared(value: Any, option: NamedOption) -> Any:
    """Convert a value to the option's type; a duration may be a number of seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and option.declared.unit == "duration" else value


def flag_of(name: str) -> str:
    """Return an option's flag."""
    return f"--{name.replace('_', '-')}"


def several(value: Any) -> tuple[Any, ...]:
    """Normalise --model, which may be repeated."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return the command line that gives these values again."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            flags += [part for value in values for part in (f"--{flag}", str(value))]
    return flags


def configuration_file(environment: Mapping[str, str]) -> Path:
    """Return the configuration file unless a flag names another; it need not exist."""
    named = environment.get("MLXSERVE_CONFIG")
    return Path(named) if named else config_home() / "config.toml"


def _chosen(file: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the file that was named, or the one in the usual place, if it exists."""
    chosen = file or configuration_file(environment)
    is_named = file is not None or bool(environment.get("MLXSERVE_CONFIG"))
    return chosen if is_named or chosen.exists() else None


@dataclass(frozen=True, slots=True)
class _File:
    path: Path | None
    values: Mapping[str, Any]


def _content(file: Path | None) -> _File:
    """Parse the file. Raises InvalidConfig."""
    if file is None:
        return _File(None, {})
    try:
        return _File(file, tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"The configuration {file} cannot be read: {error}") from error


def _from_file(file: _File, known: Mapping[str, NamedOption]) -> dict[str, Given]:
    tuning = file.values.get(_TUNING, {})
    if not isinstance(tuning, dict):
        raise InvalidConfig(f"{file.path}: {_TUNING} must be a table: [{_TUNING}]")
    values = {}
    for name, value in file.values.items():
        if name not in (_TABLES, _TUNING):
            _check_place(name, known, f"{file.path}", is_tuning=False)
            values[name] = Given(value, f"set in {file.path}", is_of_file=True)
    for name, value in tuning.items():
        where = f"{file.path}, [{_TUNING}]"
        _check_place(name, known, where, is_tuning=True)
        values[name] = Given(value, f"set in {where}", is_of_file=True)
    return values


def _check_place(
    name: str, known: Mapping[str, NamedOption], where: str, *, is_tuning: bool
) -> None:
    """Raises InvalidConfig for an option that is unknown or set in the wrong place."""
    if name not in known:
        raise InvalidConfig(f"{where}: {unknown_option(name, known)}")
    if known[name].declared.is_tuning and not is_tuning:
        raise InvalidConfig(
            f"{where}: {name} is set in the table [{_TUNING}] of the configuration file, or by "
            f"{PREFIX}{_TUNING.upper()}_{name.upper()} in the environment."
        )
    if is_tuning and not known[name].declared.is_tuning:
        raise InvalidConfig(f"{where}: {name} is set outside the table [{_TUNING}].")


def _tables(file: _File) -> dict[str, dict[str, Given]]:
    """Values of the tables of models, by name. Raises InvalidConfig."""
    tables = file.values.get(_TABLES, {})
    if not isinstance(tables, dict) or not all(
        isinstance(table, dict) for table in tables.values()
    ):
        raise InvalidConfig(
            f'{file.path}: {_TABLES} must be tables, one for each model: [{_TABLES}."NAME"]'
        )
    known = {
        option.name for schema in (EngineConfig, ModelOptions) for option in options_of(schema)
    }
    by_model = {}
    for model, table in tables.items():
        where = f'[{_TABLES}."{model}"]'
        for name in table:
            if name not in known:
                raise InvalidConfig(f"{file.path}, {where}: {unknown_option(name, known)}")
        by_model[model] = {
            name: Given(value, f"set in {file.path}, {where}", is_of_file=True)
            for name, value in table.items()
        }
    return by_model


def _from_environment(
    environment: Mapping[str, str], known: Mapping[str, NamedOption]
) -> dict[str, Given]:
    values = {}
    for variable in sorted(environment.keys() - OTHER_NAMES):
        text = environment[variable]
        if not variable.startswith(PREFIX) or not text:
            continue
        name, source = variable.removeprefix(PREFIX).lower(), f"set by {variable}"
        is_tuning = name.startswith(f"{_TUNING}_")
        name = name.removeprefix(f"{_TUNING}_")
        _check_place(name, known, f"{variable} in the environment", is_tuning=is_tuning)
        try:
            values[name] = Given(known[name].parsed(text), source)
        except InvalidConfig as error:
            raise InvalidConfig(f"{error} ({source})", option=name) from error
    return values
