"""Settings: one schema for every option, whether it comes from a flag, the environment or a file.

    flag  >  MLXSERVE_NAME in the environment  >  the file  >  the schema's default

The file is TOML with one `name = value` for each option, under the names that the schemas' fields
have; flags write them with dashes. A name that nobody knows is an error, because an option that is
ignored in silence is looked for in the wrong place.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from mlxserve.config import config_home
from mlxserve.errors import InvalidConfig

PREFIX = "MLXSERVE_"
# Of the same prefix, but no options: secrets, folders, what acts before options are read, and what
# our tests are told.
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
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and who gave it."""

    value: Any
    source: str


class Settings:
    """What was given for the fields of some schemas, each a dataclass that checks its values."""

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
        schemas: Iterable[type],
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        file: Path | None = None,
    ) -> Settings:
        """`flags` that are None were not given. Raises InvalidConfig."""
        kinds = {name: kind for schema in schemas for name, kind in types_of(schema).items()}
        flags = {name: value for name, value in flags.items() if value is not None}
        given = {
            **_from_file(_chosen(file, environment), kinds),
            **_from_environment(environment, kinds),
            **{name: Given(value, "a flag") for name, value in flags.items()},
        }
        return cls(flags, given, file)

    def build(self, schema: type[T]) -> T:
        """The schema with what was given for it. Raises InvalidConfig, with the source's name."""
        names = types_of(schema).keys() & self._given.keys()
        try:
            return schema(**{name: self._given[name].value for name in names})
        except InvalidConfig as error:
            sources = [self._given[name].source for name in names if str(error).startswith(name)]
            if not sources or sources == ["a flag"]:
                raise
            raise InvalidConfig(f"{error} ({sources[0]})") from error


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


def types_of(schema: type) -> dict[str, Any]:
    """The options of a schema and their types, in order."""
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in _fields(schema)}


def defaults_of(schema: type) -> dict[str, Any]:
    found = {field.name: field.default for field in _fields(schema)}
    assert MISSING not in found.values(), "an option needs a default"
    return found


def _fields(schema: Any) -> tuple[Field[Any], ...]:
    return fields(schema)


def _chosen(file: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The file that was named, or the one in the usual place, if there is one."""
    named = file or (Path(path) if (path := environment.get("MLXSERVE_CONFIG")) else None)
    if named is not None:
        return named
    usual = config_home() / "config.toml"
    return usual if usual.exists() else None


def _from_file(file: Path | None, kinds: Mapping[str, Any]) -> dict[str, Given]:
    if file is None:
        return {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"The configuration {file} cannot be read: {error}") from error
    for name in content:
        if name not in kinds:
            raise InvalidConfig(f"{file}: {_unknown(name, kinds)}")
    return {
        name: Given(tuple(value) if isinstance(value, list) else value, f"set in {file}")
        for name, value in content.items()
    }


def _from_environment(environment: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Given]:
    given = {}
    for variable in sorted(environment.keys() - OTHER_NAMES):
        if not variable.startswith(PREFIX) or not environment[variable]:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in kinds:
            raise InvalidConfig(f"{variable} in the environment: {_unknown(name, kinds)}")
        value = _parsed(environment[variable], kinds[name], variable)
        given[name] = Given(value, f"set by {variable}")
    return given


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    advice = f" Did you mean {' or '.join(near)}?" if near else " See `mlxserve serve --help`."
    return f"there is no option {name[:80]!r}.{advice}"


def _parsed(text: str, kind: Any, variable: str) -> Any:
    """A variable's text as the option's type."""
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind in (int, int | None):
            return int(text)
        if kind is float:
            return float(text)
    except (ValueError, KeyError) as error:
        wanted = {bool: "true or false", float: "a number"}.get(kind, "a whole number")
        raise InvalidConfig(f"{variable} must be {wanted}, got {text[:80]!r}") from error
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
