"""Option: what one field of a config accepts, and the text that explains it.

A config is a frozen dataclass of options, each declared once, where the field is:

    max_num_seqs: Annotated[
        int, Option("Most requests that run at once.", "Scheduling", "requests", ge=1)
    ] = 64

Its check, its flag, its names in the configuration file and the environment, its entry in `--help`
and its row in the documentation all come from that line. Standard library only: the scheduler
and `mlxserve chat`, which must open fast, import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields, replace
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args, get_origin, get_type_hints

from mlxserve.core.errors import InvalidConfig

# Of a number whose option declares no highest value: what fits into an array's index, and into a timer.
_HIGHEST = {int: 2**31 - 1, float: 1e9}
_SHOWN = 80  # characters of a refused value

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


# Sections of `--help`.
Panel: TypeAlias = Literal[
    "Server",
    "Security",
    "Limits",
    "Model",
    "Memory",
    "Scheduling",
    "Disk cache",
    "Parallel",
    "Recovery",
    "Log",
]


@dataclass(frozen=True, slots=True)
class Option:
    """`unit` and the bounds `ge`, `gt` and `le` are those of a number.

    `default` describes what None, the field's default, leads to. `short` is a second flag.
    """

    help: str
    panel: Panel
    unit: str = ""
    _: KW_ONLY
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: tuple[Any, ...] = ()
    default: str = ""
    short: str = ""
    is_basic: bool = False  # shown by `--help`; all others by `--help-all`
    # Set in the file's table [tuning], by MLXSERVE_TUNING_NAME or in Python; it has no flag.
    is_tuning: bool = False


@dataclass(frozen=True, slots=True)
class NamedOption:
    """An option with its field's name, type (without None) and default."""

    name: str
    kind: Any  # bool, int, float, str, an Enum, or tuple[str, ...]
    is_optional: bool  # None is accepted
    default: Any
    declared: Option

    @property
    def choices(self) -> tuple[Any, ...]:
        """Allowed values; an Enum's members are lower-case names. Empty if any value is allowed."""
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(member.name.lower() for member in self.kind)
        return self.declared.choices

    def default_text(self) -> str:
        """The default as people read it; empty for a flag that is off or a list that is empty."""
        if self.default is None:
            return self.declared.default
        if isinstance(self.default, Enum):
            return self.default.name.lower()
        if isinstance(self.default, bool):
            return "on" if self.default else ""
        return "" if self.default == () else str(self.default)

    def checked(self, value: Any) -> Any:
        """Return the value as the field's type. Raises InvalidConfig."""
        if value is None and self.is_optional:
            return value
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            if isinstance(value, self.kind):
                return value
            if isinstance(value, str) and value in self.choices:
                return self.kind[value.upper()]
        elif self.choices:
            if type(value) is self.kind and value in self.choices:
                return value
        elif self._accepts(value):
            return tuple(value) if isinstance(value, list) else value
        raise self._refusal(value)

    def parsed(self, text: str) -> Any:
        """Parse a text, as from an environment variable. Raises InvalidConfig."""
        try:
            if self.kind is bool:
                return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
            if self.kind in (int, float):
                return self.kind(text)
        except (ValueError, KeyError) as error:
            raise self._refusal(text[:80]) from error
        if self.kind == tuple[str, ...]:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return text

    def _accepts(self, value: Any) -> bool:
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is str:
            return isinstance(value, str) and (bool(value) or not self.is_optional)
        if self.kind == tuple[str, ...]:
            is_list = isinstance(value, (tuple, list))
            return is_list and all(isinstance(text, str) and text for text in value)
        numbers = (int,) if self.kind is int else (int, float)
        if not isinstance(value, numbers) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return self._is_in_bounds(value)

    def _is_in_bounds(self, value: float) -> bool:
        declared = self.declared
        return (
            (declared.ge is None or value >= declared.ge)
            and (declared.gt is None or value > declared.gt)
            and value <= self._highest
        )

    @property
    def _highest(self) -> float:
        return _HIGHEST[self.kind] if self.declared.le is None else self.declared.le

    def _is_too_high(self, value: object) -> bool:
        """True if it is above the default upper bound."""
        is_open = self.kind in _HIGHEST and self.declared.le is None
        return is_open and isinstance(value, (int, float)) and value > self._highest

    def _refusal(self, value: object) -> InvalidConfig:
        wanted = self._wanted()
        if self._is_too_high(value):
            wanted += f" and at most {self._highest:.0f}"
        message = f"{self.name} must be {wanted}, got {value!r:.{_SHOWN}}"
        return InvalidConfig(message, option=self.name)

    def _wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "non-empty text" if self.is_optional else "text"
        if self.kind == tuple[str, ...]:
            return "a list of texts"
        what = "a whole number" if self.kind is int else "a number"
        if self.declared.unit:
            what += f" of {self.declared.unit}"
        return what + _bounds(self.declared)


def _bounds(declared: Option) -> str:
    low, above, high = declared.ge, declared.gt, declared.le
    if low is not None:
        return f", at least {low}" if high is None else f" from {low} to {high}"
    if above is not None:
        return f" above {above}" + ("" if high is None else f" and at most {high}")
    return "" if high is None else f", at most {high}"


class Options:
    """Base of the configs: validates every option on construction. Raises InvalidConfig."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            # A nested config has checked its own.
            if hasattr(self, option.name):
                value = option.checked(getattr(self, option.name))
                object.__setattr__(self, option.name, value)
        self.check_together()

    def check_together(self) -> None:
        """Check rules about several options. Raises InvalidConfig."""

    def with_options(self, **values: Any) -> Self:
        """Return a copy with these options, including those of nested configs.

        Raises InvalidConfig.
        """
        known = {option.name for option in options_of(type(self))}
        for name in values:
            if name not in known:
                raise unknown_option(name, known)
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            current = getattr(self, field.name)
            if isinstance(current, Options):
                nested = {option.name for option in options_of(type(current))} & values.keys()
                current = current.with_options(**{name: values[name] for name in nested})
                changed[field.name] = current
            elif field.name in values:
                changed[field.name] = values[field.name]
        return replace(self, **changed)  # type: ignore[type-var]


def unknown_option(name: str, known: Iterable[str]) -> InvalidConfig:
    """Return the error for an unknown name, with similarly spelled options."""
    import difflib

    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    advice = f" Did you mean {' or '.join(near)}?" if near else " See `mlxserve serve --help-all`."
    return InvalidConfig(f"there is no option {name[:80]!r}.{advice}")


def options_of(schema: type[Options]) -> tuple[NamedOption, ...]:
    """List a config's options, with those of nested configs in their place."""
    if schema in _found:
        return _found[schema]
    hints = get_type_hints(schema, include_extras=True)
    options: list[NamedOption] = []
    for field in fields(schema):  # type: ignore[arg-type]
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            options.append(_named(field.name, hint, field.default))
        else:
            options += options_of(hint)
    _found[schema] = tuple(options)
    return _found[schema]


def given_options(config: Options) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name, as JSON values.

    Those of nested configs are included.
    """
    default = type(config)()
    changed: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, Options):
            changed |= given_options(value)
        elif value != getattr(default, field.name):
            changed[field.name] = value.name.lower() if isinstance(value, Enum) else value
    return changed


# Not functools.cache: to mypy the class of a dataclass that compares is not hashable.
_found: dict[type[Options], tuple[NamedOption, ...]] = {}


def _named(name: str, hint: Any, default: Any) -> NamedOption:
    kind, declared = get_args(hint)
    assert isinstance(declared, Option), f"{name} is annotated with something else"
    is_optional = isinstance(kind, UnionType)
    if is_optional:
        [kind] = [part for part in get_args(kind) if part is not type(None)]
    return NamedOption(name, kind, is_optional, default, declared)
