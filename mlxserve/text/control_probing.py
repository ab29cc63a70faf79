"""Finds the controls of a chat template, by rendering it with each value of each of them.

A template is its own specification: a variable that changes the prompt is a control, and a value that it
treats otherwise than an unknown one is a value that it knows. GLM-5.3 renders every effort that it does
not know as max, and gpt-oss inserts any string, also one that the model was not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from mlxserve.text.controls import (
    BUDGET_NAME,
    EFFORT_NAME,
    LADDER,
    OFF_WORDS,
    SWITCH,
    Controls,
    Efforts,
    rank,
)
from mlxserve.text.parsing.formats import THINKING
from mlxserve.text.probes import TOOL, Message, Probe, RenderEach

_LOW, _MEDIUM = LADDER.index("low"), LADDER.index("medium")
# The levels of a template that inserts any string and names fewer than two: gpt-oss was trained on these.
_COMMON = ("low", "medium", "high")
_UNKNOWN = "zqeffort"
_MAX_LITERALS, _MAX_SWITCHES = 16, 8
# Parts of the names of variables.
_THINKING_PARTS = frozenset({"think", "thinking", "reason", "reasoning"})
_NEGATIVE_PARTS = frozenset({"disable", "no", "skip", "without"})
# Of variables for earlier answers, not for the next one.
_HISTORY_PARTS = frozenset(
    {
        "clear",
        "drop",
        "history",
        "interleaved",
        "keep",
        "preserve",
        "preserved",
        "strip",
        "truncate",
    }
)
_ON_WORDS = ("on", "enabled", "thinking", "think", "reasoning", "adaptive", "auto")
_IN_SYSTEM = ("/no_think", "/nothink")
_TOKENS, _MORE_TOKENS = 4_096, 8_192
_CONVERSATION: list[Message] = [{"role": "user", "content": "zqa"}]

# What the template renders without and with a tool; None where it raises.
_Prompts: TypeAlias = tuple[str, ...] | None


def find_controls(render_each: RenderEach, literals: Mapping[str, Sequence[str]]) -> Controls:
    """The controls of the template that `render_each` renders.

    literals: the strings that the template compares each of its variables with
    """
    switch = _find_switch(render_each, literals)
    efforts = tuple(
        each.efforts() for each in _probed_efforts(render_each, literals, switch) if each.has_effect
    )
    budget, is_off_at_zero = _find_budget(render_each, literals, switch)
    off, on = switch.off, switch.on
    if not switch.is_found:
        off, on = _off_variables(efforts), _on_variables(efforts)
    if not off and budget is not None and is_off_at_zero:
        off = {budget: 0}
    return Controls(
        off=off,
        on=on,
        off_word=None if off or switch.is_refused else _find_word(render_each),
        always_thinks=switch.is_refused,
        efforts=efforts,
        budget=budget,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    """The variables that turn thinking on and off; is_refused: the template raises for off."""

    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    is_found: bool = True
    is_refused: bool = False


def _find_switch(render_each: RenderEach, literals: Mapping[str, Sequence[str]]) -> _Switch:
    """The first variable that turns thinking on and off, `enable_thinking` before all others."""
    others = sorted((name for name in literals if _is_switch(name)), key=lambda n: (len(n), n))
    tried: dict[str, list[Any]] = {SWITCH: [None, True, False]}
    for name in others[:_MAX_SWITCHES]:
        tried[name] = [None, True, False, _UNKNOWN, *literals[name][:_MAX_LITERALS]]
    settings = [
        {SWITCH: True, **({} if value is None else {name: value})}
        if name != SWITCH or value is not None
        else {}
        for name, values in tried.items()
        for value in values
    ]
    rendered = iter(_rendered(render_each, settings))
    probed = {name: {value: next(rendered) for value in values} for name, values in tried.items()}
    for name, prompts in probed.items():
        if (pair := _on_and_off(name, prompts)) is not None:
            on, off = pair
            return _Switch(on={} if on is None else {name: on}, off={name: off})
    is_refused = probed[SWITCH][True] is not None and probed[SWITCH][False] is None
    return _Switch(is_found=False, is_refused=is_refused)


def _is_switch(name: str) -> bool:
    parts = {*name.split("_")}
    return (
        name != SWITCH
        and bool(parts & _THINKING_PARTS)
        and not parts & _HISTORY_PARTS
        and not any(each.fullmatch(name) for each in (EFFORT_NAME, BUDGET_NAME))
    )


def _on_and_off(name: str, prompts: Mapping[Any, _Prompts]) -> tuple[Any, Any] | None:
    """The values for on and off whose prompts differ: words that the template names, else true and false.

    The word for on is that of the template's default, if the default thinks. None leaves the variable unset.
    """
    thinks = {v: _thinks(name, v, each) for v, each in prompts.items() if each is not None}
    words = [value for value in prompts if isinstance(value, str)]
    if all(prompts[word] == prompts[_UNKNOWN] for word in words):
        words = []
    ons = sorted(words, key=lambda word: (prompts[word] != prompts[None], word not in _ON_WORDS))
    pairs = (
        (on, off)
        for off in (*words, False, True)
        for on in (*ons, *((None, True) if words else (True, False, None)))
        if thinks.get(on) is True and thinks.get(off) is False and prompts[on] != prompts[off]
    )
    return next(pairs, None)


def _thinks(name: str, value: object, prompts: tuple[str, ...]) -> bool | None:
    """Whether a model thinks after these prompts: by the marker that they end with, else by the value."""
    if value == _UNKNOWN or value in OFF_WORDS:
        return False if value in OFF_WORDS else None
    for begin, end in THINKING:
        if all(text.rstrip().endswith(begin.strip()) for text in prompts):
            return True
        if all(begin.strip() in text and text.rstrip().endswith(end.strip()) for text in prompts):
            return False
    if isinstance(value, bool):
        return value is _NEGATIVE_PARTS.isdisjoint(name.split("_"))
    if isinstance(value, str):
        return True if value in _ON_WORDS else None
    return True


def _find_word(render_each: RenderEach) -> str | None:
    """The word that changes the prompt when it ends the system message, beyond being in it."""
    texts = ["zqs", *(f"zqs {word}" for word in _IN_SYSTEM)]
    plain, *others = render_each(
        [Probe([{"role": "system", "content": text}, *_CONVERSATION], None, {}) for text in texts]
    )
    found = (
        word
        for word, text in zip(_IN_SYSTEM, others, strict=True)
        if None not in (plain, text) and str(text).replace(f" {word}", "") != plain
    )
    return next(found, None)


def _find_budget(
    render_each: RenderEach, literals: Mapping[str, Sequence[str]], switch: _Switch
) -> tuple[str | None, bool]:
    """The variable for a number of tokens, and whether the template treats 0 otherwise than a number."""
    names = [name for name in literals if BUDGET_NAME.fullmatch(name)][:_MAX_SWITCHES]
    values = (None, 0, _TOKENS, _MORE_TOKENS)
    settings = [
        {SWITCH: True, **switch.on, **({} if value is None else {name: value})}
        for name in names
        for value in values
    ]
    prompts = iter(_rendered(render_each, settings)) if names else iter(())
    for name in names:
        unset, zero, some, more = (next(prompts) for _ in values)
        if some is not None and some not in (unset, more):
            at_zero = tuple(text.replace(str(_TOKENS), "0") for text in some)
            return name, zero not in (None, unset, at_zero)
    return None, False


def _probed_efforts(
    render_each: RenderEach, literals: Mapping[str, Sequence[str]], switch: _Switch
) -> list[_ProbedVariable]:
    tried: dict[str, list[str | None]] = {
        name: list(dict.fromkeys((None, _UNKNOWN, *LADDER, *strings[:_MAX_LITERALS])))
        for name, strings in literals.items()
        if EFFORT_NAME.fullmatch(name)
    }
    settings = [
        {SWITCH: True, **switch.on, **({} if value is None else {name: value})}
        for name, values in tried.items()
        for value in values
    ]
    prompts = iter(_rendered(render_each, settings)) if tried else iter(())
    return [
        _ProbedVariable(name, literals[name], {v: next(prompts) for v in values}, switch.is_found)
        for name, values in tried.items()
    ]


def _off_variables(efforts: Sequence[Efforts]) -> dict[str, str]:
    none = {each.variable: each.mapping["none"] for each in efforts}
    return {name: value for name, value in none.items() if value in OFF_WORDS and value is not None}


def _on_variables(efforts: Sequence[Efforts]) -> dict[str, str]:
    """Return the default; if that turns thinking off, `high`, the default of Anthropic's API."""
    values = {
        e.variable: e.mapping["high"] if e.default in OFF_WORDS else e.default for e in efforts
    }
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
        if self._inserts_any and len({*known} - {*OFF_WORDS}) < 2:
            known += [value for value in _COMMON if value not in known and self.prompts[value]]
        return sorted(known, key=lambda v: len(LADDER) if (place := rank(v)) is None else place)

    def _recognises(self, value: str) -> bool:
        """True if the template accepts a value and treats it, or names it, otherwise than an unknown one."""
        unknown, prompts = self.prompts[_UNKNOWN], self.prompts[value]
        if value == _UNKNOWN or prompts is None:
            return False
        is_named = value in self.literals and rank(value) is not None
        return is_named or unknown is None or prompts != tuple(_insert(t, value) for t in unknown)

    @cached_property
    def _inserts_any(self) -> bool:
        return any(_UNKNOWN in text.casefold() for text in self.prompts[_UNKNOWN] or ())

    @cached_property
    def _default(self) -> str | None:
        unset = self.prompts[None]
        same = [v for v in self._known if unset is not None and self.prompts[v] == unset]
        return next((v for v in same if v in OFF_WORDS), same[-1] if same else None)

    def _nearest(self, level: str) -> str | None:
        """The known value that is nearest to a level of the ladder.

        Of two at the same distance it is the one that has the prompt of the level itself, if the template
        accepts that; otherwise the lower one up to medium, where no model should think longer than the
        client expects, and the higher one above. Only none and minimal may turn thinking off.
        """
        place = LADDER.index(level)
        if level in self._known:
            return level
        off = next((value for value in self._known if value in OFF_WORDS), None)
        if place == 0 and (off is not None or self.has_switch):
            return off
        ranks = self._ranks([v for v in self._known if v != off or place < _LOW])

        def distance(value: str | None) -> tuple[int, bool, int]:
            return (
                abs(ranks[value] - place),
                self.prompts[value] != self.prompts[level],
                ranks[value] if place <= _MEDIUM else -ranks[value],
            )

        return min(ranks, key=distance, default=None)

    def _ranks(self, values: Sequence[str]) -> dict[str | None, int]:
        """Places on the ladder.

        An unnamed default counts as medium, the default of OpenAI's API.
        """
        ranks: dict[str | None, int] = {v: place for v in values if (place := rank(v)) is not None}
        if self._default is None and self.prompts[None] is not None:
            ranks |= {} if _MEDIUM in ranks.values() else {None: _MEDIUM}
        return ranks


def _insert(text: str, value: str) -> str:
    """The prompt of the unknown value with another value inserted instead."""
    for case in (str.lower, str.capitalize, str.upper):
        text = text.replace(case(_UNKNOWN), case(value))
    return text
