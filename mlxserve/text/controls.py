"""A chat template's controls of thinking: whether the model thinks, and with how much effort.

Clients choose an effort from one ladder, `none` to `max`. Templates accept a few of these levels, under
variables of their own: Qwen3.8 raises for all but low, medium and xhigh, Hy3 has `no_think` for none, Kimi K3
reads `thinking_effort`, GLM-5.3 renders every level that it does not know as max, and gpt-oss inserts any
string, also one that the model was not trained on. Rendering each level when the model is loaded shows which
ones a template knows, and each other level is mapped to the nearest of them. The mapping depends on the
template alone, so the prompt of a conversation does not change from one turn to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from mlxserve.text.probes import TOOL, Probe, RenderEach

# The template variables that requests of all APIs are translated to.
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
LADDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LOW, _MEDIUM = LADDER.index("low"), LADDER.index("medium")
_OFF = ("none", "no_think", "nothink", "no_thinking", "off", "disabled")
# The levels of a template that inserts any string and names fewer than two: gpt-oss was trained on these.
_COMMON = ("low", "medium", "high")
_EFFORT_NAME = re.compile(
    r"(?:\w+_)?effort(?:_level)?|(?:reasoning|thinking|think)_(?:level|strength)"
)
_UNKNOWN = "zqeffort"
_MAX_LITERALS = 16
_CONVERSATION = [{"role": "user", "content": "zqa"}]

# What the template renders without and with a tool; None where it raises.
_Prompts: TypeAlias = tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Efforts:
    """A template variable for the effort.

    values: the levels that the template knows, ascending
    default: the level of a prompt without the variable; None if that prompt differs from all of theirs
    mapping: from each level of the ladder to the value to set; None leaves the variable unset
    """

    variable: str
    values: tuple[str, ...]
    default: str | None
    mapping: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Variables to render with, and how they differ from those of the request."""

    variables: Mapping[str, Any]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The controls of one template.

    off, on: the variables that turn thinking off and on; empty if none does
    always_thinks: the template raises when thinking is turned off
    """

    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    always_thinks: bool = False
    efforts: tuple[Efforts, ...] = ()

    def attempts(self, requested: Mapping[str, Any]) -> Iterator[Attempt]:
        """The request's variables as the template accepts them, then the same without an effort.

        The second attempt is for templates that refuse an effort only in some conversations.
        """
        mapped = self._mapped(requested)
        yield mapped
        names = {EFFORT, *(each.variable for each in self.efforts)} & mapped.variables.keys()
        if names:
            others = {k: v for k, v in mapped.variables.items() if k not in names}
            values = ", ".join(sorted({str(mapped.variables[name]) for name in names}))
            yield Attempt(
                others, (f"effort {values[:64]} is left out, which the template refuses",)
            )

    def _mapped(self, requested: Mapping[str, Any]) -> Attempt:
        variables = dict(requested)
        changes: list[str] = []
        thinks = requested.get(SWITCH)
        if thinks is None and requested.get(EFFORT) == "none":
            thinks = variables[SWITCH] = False
        if thinks is False and self.always_thinks:
            variables[SWITCH] = True
            changes.append("thinking stays on")
        for efforts in self.efforts:
            variables.pop(efforts.variable, None)
            level = self._level(efforts, requested, thinks=thinks)
            value = efforts.mapping.get(level, level) if isinstance(level, str) else level
            if value is not None:
                variables[efforts.variable] = value
            has_effect = thinks is not False or SWITCH not in self.off
            if value != level and value not in _OFF and has_effect:
                changes.append(f"effort {level} is {_described(efforts, value)}")
        return Attempt(variables, tuple(dict.fromkeys(changes)))

    def _level(self, efforts: Efforts, requested: Mapping[str, Any], *, thinks: object) -> object:
        """Return the requested level. Without a switch, the effort alone can turn thinking off."""
        if thinks is False and SWITCH not in self.off:
            return "none"
        level = requested.get(EFFORT, requested.get(efforts.variable))
        return self.on.get(efforts.variable) if level is None and thinks else level


def _described(efforts: Efforts, value: object) -> str:
    if value is not None:
        return str(value)
    return "the template's default" if efforts.values else "left out"


def has_controls(variables: Mapping[str, Any]) -> bool:
    """True if any of the variables controls thinking."""
    return any(name == SWITCH or _EFFORT_NAME.fullmatch(name) for name in variables)


def find_controls(render_each: RenderEach, literals: Mapping[str, Sequence[str]]) -> Controls:
    """The controls of the template that `render_each` renders.

    literals: the strings that the template compares each of its variables with
    """
    tried: dict[str, list[str | None]] = {
        name: list(dict.fromkeys((None, _UNKNOWN, *LADDER, *strings[:_MAX_LITERALS])))
        for name, strings in literals.items()
        if _EFFORT_NAME.fullmatch(name)
    }
    settings: list[dict[str, Any]] = [{SWITCH: True}, {SWITCH: False}]
    for name, values in tried.items():
        settings += [{SWITCH: True} | ({} if value is None else {name: value}) for value in values]
    on, off, *others = _rendered(render_each, settings)
    has_switch = on is not None and off is not None and on != off
    prompts = iter(others)
    probed = [
        _ProbedVariable(name, literals[name], {v: next(prompts) for v in values}, has_switch)
        for name, values in tried.items()
    ]
    efforts = tuple(each.efforts() for each in probed if each.has_effect)
    return Controls(
        off={SWITCH: False} if has_switch else _off_variables(efforts),
        on={SWITCH: True} if has_switch else _on_variables(efforts),
        always_thinks=on is not None and off is None,
        efforts=efforts,
    )


def _off_variables(efforts: Sequence[Efforts]) -> dict[str, str]:
    none = {each.variable: each.mapping["none"] for each in efforts}
    return {name: value for name, value in none.items() if value in _OFF and value is not None}


def _on_variables(efforts: Sequence[Efforts]) -> dict[str, str]:
    """Return the default; if that turns thinking off, `high`, the default of Anthropic's API."""
    values = {e.variable: e.mapping["high"] if e.default in _OFF else e.default for e in efforts}
    switches = _off_variables(efforts)
    return {name: value for name, value in values.items() if name in switches and value is not None}


def _rendered(render_each: RenderEach, settings: Sequence[Mapping[str, Any]]) -> list[_Prompts]:
    """Render with each of the settings the conversations that any setting renders."""
    tools = (None, [TOOL])
    texts = render_each([Probe(_CONVERSATION, t, each) for each in settings for t in tools])
    columns = [column for column in (texts[::2], texts[1::2]) if any(column)]
    rows = zip(*columns, strict=True) if columns else ((None,) for _ in settings)
    return [tuple(t for t in row if t is not None) if None not in row else None for row in rows]


@dataclass(frozen=True)
class _ProbedVariable:
    """A probed variable; prompts: by the value of the variable; None leaves it unset."""

    name: str
    literals: Sequence[str]
    prompts: Mapping[str | None, _Prompts]
    has_switch: bool

    @property
    def has_effect(self) -> bool:
        return len(set(self.prompts.values())) > 1

    def efforts(self) -> Efforts:
        return Efforts(
            variable=self.name,
            values=tuple(self._known),
            default=self._default,
            mapping={level: self._nearest(level) for level in LADDER},
        )

    @cached_property
    def _known(self) -> list[str]:
        """The values that the template knows, ascending; those that are not on the ladder come last."""
        known = [value for value in self.prompts if value and self._recognises(value)]
        if self._inserts_any and len({*known} - {*_OFF}) < 2:
            known += [value for value in _COMMON if value not in known and self.prompts[value]]
        return sorted(known, key=lambda v: len(LADDER) if (rank := _rank(v)) is None else rank)

    def _recognises(self, value: str) -> bool:
        """True if the template accepts a value and treats it, or names it, otherwise than an unknown one."""
        unknown, prompts = self.prompts[_UNKNOWN], self.prompts[value]
        if value == _UNKNOWN or prompts is None:
            return False
        is_named = value in self.literals and _rank(value) is not None
        return is_named or unknown is None or prompts != tuple(_insert(t, value) for t in unknown)

    @cached_property
    def _inserts_any(self) -> bool:
        return any(_UNKNOWN in text.casefold() for text in self.prompts[_UNKNOWN] or ())

    @cached_property
    def _default(self) -> str | None:
        unset = self.prompts[None]
        same = [v for v in self._known if unset is not None and self.prompts[v] == unset]
        return next((v for v in same if v in _OFF), same[-1] if same else None)

    def _nearest(self, level: str) -> str | None:
        """The known value that is nearest to a level of the ladder.

        Of two at the same distance it is the one that has the prompt of the level itself, if the template
        accepts that; otherwise the lower one up to medium, where no model should think longer than the
        client expects, and the higher one above. Only none and minimal may turn thinking off.
        """
        rank = LADDER.index(level)
        if level in self._known:
            return level
        off = next((value for value in self._known if value in _OFF), None)
        if rank == 0 and (off is not None or self.has_switch):
            return off
        ranks = self._ranks([v for v in self._known if v != off or rank < _LOW])

        def distance(value: str | None) -> tuple[int, bool, int]:
            return (
                abs(ranks[value] - rank),
                self.prompts[value] != self.prompts[level],
                ranks[value] if rank <= _MEDIUM else -ranks[value],
            )

        return min(ranks, key=distance, default=None)

    def _ranks(self, values: Sequence[str]) -> dict[str | None, int]:
        """Places on the ladder.

        An unnamed default counts as medium, the default of OpenAI's API.
        """
        ranks: dict[str | None, int] = {v: rank for v in values if (rank := _rank(v)) is not None}
        if self._default is None and self.prompts[None] is not None:
            ranks |= {} if _MEDIUM in ranks.values() else {None: _MEDIUM}
        return ranks


def _rank(value: str) -> int | None:
    """The place of a value on the ladder; None if it has none."""
    if value in _OFF:
        return 0
    return LADDER.index(value) if value in LADDER else None


def _insert(text: str, value: str) -> str:
    """The prompt of the unknown value with another value inserted instead."""
    for case in (str.lower, str.capitalize, str.upper):
        text = text.replace(case(_UNKNOWN), case(value))
    return text
