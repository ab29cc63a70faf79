"""Settings: the values of options, from flags, the environment and a file.

    flag  >  MLXSERVE_NAME in the environment  >  the file  >  the default

The file is TOML with one `name = value` per option, named like the configs' fields; flags are spelled
with dashes. An unknown name is an error: a misspelled option that is silently ignored is hard to find.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlxserve.config import config_home
from mlxserve.errors import InvalidConfig
from mlxserve.option import NamedOption, Options, options_of, unknown_option

PREFIX = "MLXSERVE_"
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
    """A value and where it comes from, which is empty for a flag."""

    value: Any
    source: str


class Settings:
    """What was given for the options of some configs."""

    def __init__(
        self, flags: Mapping[str, Any], given: Mapping[str, Given], file: Path | None
    ) -> None:
        """`file`: the one that was named by a flag."""
        self.flags = flags
        self.file = file
        self._given = given

    @classmethod
    def read(
        cls,
        schemas: Iterable[type[Options]],
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        file: Path | None = None,
    ) -> Settings:
        """`flags` that are None were not given. Raises InvalidConfig."""
        known = {option.name: option for schema in schemas for option in options_of(schema)}
        flags = {name: value for name, value in flags.items() if value is not None}
        given = {
            **_from_file(_chosen(file, environment), known),
            **_from_environment(environment, known),
            **{name: Given(value, "") for name, value in flags.items()},
        }
        return cls(flags, given, file)

    def has(self, name: str) -> bool:
        """Whether the option was given, anywhere."""
        return name in self._given

    def with_model(self, name: str) -> Settings:
        """The same with this model, as if --model named it. Raises InvalidConfig if it does, too."""
        if "model" in self.flags:
            raise InvalidConfig(
                f"The model is named twice: {name!r} and --model. Leave one of them out."
            )
        other = copy.copy(self)
        other.flags = {**self.flags, "model": name}
        other._given = {**self._given, "model": Given(name, "")}
        return other

    def build(self, schema: type[T]) -> T:
        """The config with what was given for it. Raises InvalidConfig that names the source."""
        names = {option.name for option in options_of(schema)} & self._given.keys()
        try:
            return schema().with_options(**{name: self._given[name].value for name in names})
        except InvalidConfig as error:
            given = self._given.get(error.option or "")
            if given is None or not given.source:
                raise
            raise InvalidConfig(f"{error} ({given.source})", option=error.option) from error


def flags_of(given: Mapping[str, Any]) -> list[str]:
    """The command line that gives these values again."""
    flags: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            flags += [part for one in values for part in (f"--{flag}", str(one))]
    return flags


def configuration_file(environment: Mapping[str, str]) -> Path:
    """The file that is read unless a flag names another; it need not exist."""
    named = environment.get("MLXSERVE_CONFIG")
    return Path(named) if named else config_home() / "config.toml"


def _chosen(file: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The file that was named, or the one in the usual place, if there is one."""
    chosen = file or configuration_file(environment)
    is_named = file is not None or bool(environment.get("MLXSERVE_CONFIG"))
    return chosen if is_named or chosen.exists() else None


def _from_file(file: Path | None, known: Mapping[str, NamedOption]) -> dict[str, Given]:
    if file is None:
        return {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"The configuration {file} cannot be read: {error}") from error
    for name in content:
        if name not in known:
            raise InvalidConfig(f"{file}: {unknown_option(name, known)}")
    return {name: Given(value, f"set in {file}") for name, value in content.items()}


def _from_environment(
    environment: Mapping[str, str], known: Mapping[str, NamedOption]
) -> dict[str, Given]:
    given = {}
    for variable in sorted(environment.keys() - OTHER_NAMES):
        text = environment[variable]
        if not variable.startswith(PREFIX) or not text:
            continue
        name, source = variable.removeprefix(PREFIX).lower(), f"set by {variable}"
        if name not in known:
            raise InvalidConfig(f"{variable} in the environment: {unknown_option(name, known)}")
        try:
            given[name] = Given(known[name].parsed(text), source)
        except InvalidConfig as error:
            raise InvalidConfig(f"{error} ({source})", option=name) from error
    return given
