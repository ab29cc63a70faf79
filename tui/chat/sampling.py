"""Sampling settings: the values of `/set`, as text and as fields of a request.

    /set temperature 0.7      /set temperature off      /set preset creative

Presets are sections of `presets.toml` in the terminal's folder:

    [creative]
    temperature = 1.1
    top_p = 0.95
    system = "You write short stories."
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.system.terminal_text import one_line

OFF = "off"
PRESET = "preset"
_SYSTEM = "system"  # of a preset: the system prompt
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Above it, all but the most likely tokens are noise; a server may take more of programs.
HIGHEST_TEMPERATURE = 2.0
# Name -> whether it is a whole number, the smallest and the largest value.
_NUMBERS: dict[str, tuple[bool, float, float]] = {
    "temperature": (False, 0, HIGHEST_TEMPERATURE),
    "top_p": (False, 0.01, 1),
    "top_k": (True, 0, 2**31 - 1),
    "min_p": (False, 0, 1),
    "max_tokens": (True, 1, 2**31 - 1),
    "seed": (True, -(2**63), 2**63 - 1),
}
NAMES = (*_NUMBERS, "effort")


class SamplingRefused(Exception):
    """A name or a value that cannot be set; the message says what can."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Values that were set; all others are the model's defaults."""

    values: Mapping[str, float | int | str] = field(default_factory=dict)

    def changed(self, name: str, text: str) -> Sampling:
        """Set one value as typed; `off` removes it. Raises SamplingRefused."""
        if name not in NAMES:
            raise SamplingRefused(
                f"{one_line(name, 40)!r} cannot be set. These can: {', '.join(NAMES)}, {PRESET}."
            )
        others = {key: value for key, value in self.values.items() if key != name}
        return Sampling(others if text == OFF else {**others, name: _parsed(name, text)})

    @property
    def fields(self) -> dict[str, float | int | str]:
        """The fields of a request."""
        return {("reasoning_effort" if k == "effort" else k): v for k, v in self.values.items()}

    @property
    def label(self) -> str:
        """The settings, such as `temperature 0.7, seed 3`; empty if nothing is set."""
        return ", ".join(f"{name} {value}" for name, value in self.values.items())

    def as_text(self) -> str:
        return json.dumps(dict(self.values))

    @classmethod
    def from_text(cls, text: str | None) -> Sampling:
        """Parse what `as_text` wrote; defaults for anything else."""
        try:
            return cls.from_values(json.loads(text or "{}"))
        except (ValueError, SamplingRefused):
            return cls()

    @classmethod
    def from_values(cls, values: Any) -> Sampling:
        """Validate names and values. Raises SamplingRefused."""
        made = cls()
        if not isinstance(values, Mapping):
            raise SamplingRefused("It is not a table of names and values.")
        for name, value in values.items():
            made = made.changed(str(name), str(value))
        return made


@dataclass(frozen=True, slots=True)
class Preset:
    """A saved set of values, and a system prompt; None leaves the chat's as it is."""

    sampling: Sampling
    system: str | None = None


def preset(file: Path, name: str) -> Preset:
    """Return the preset with this name. Raises SamplingRefused."""
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        sections = {}
    except (OSError, ValueError) as error:
        raise SamplingRefused(f"{file} cannot be read: {one_line(str(error), 120)}.") from error
    if name not in sections:
        known = f"It has: {', '.join(sections)}." if sections else "Write it in that file first."
        raise SamplingRefused(f"There is no preset [{one_line(name, 40)}] in {file}. {known}")
    try:
        return _preset(sections[name])
    except SamplingRefused as error:
        raise SamplingRefused(f"[{one_line(name, 40)}] in {file}: {error}") from error


def _preset(section: Any) -> Preset:
    if not isinstance(section, Mapping):
        raise SamplingRefused("It is not a table of names and values.")
    system = section.get(_SYSTEM)
    if not isinstance(system, str | None):
        raise SamplingRefused(f"{_SYSTEM} is a text, in quotes.")
    values = {name: value for name, value in section.items() if name != _SYSTEM}
    return Preset(Sampling.from_values(values), system)


def _parsed(name: str, text: str) -> float | int | str:
    if name == "effort":
        if text not in EFFORTS:
            raise SamplingRefused(f"effort is one of {', '.join(EFFORTS)}, or {OFF}.")
        return text
    is_whole, low, high = _NUMBERS[name]
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # also for NaN
        kind = "a whole number" if is_whole else "a number"
        bounds = f"from {low:g}" if high > 1e6 else f"from {low:g} to {high:g}"
        bounds = "" if low < -1e6 else f" {bounds}"
        raise SamplingRefused(f"{name} is {kind}{bounds}, or {OFF}.")
    return value
