"""A chat template's controls of thinking: whether the model thinks, and with how much effort.

Clients choose an effort from one ladder, `none` to `max`, or turn thinking on and off, or give it a
budget of tokens. Templates read variables of their own: Qwen3.8 raises for all efforts but low, medium
and xhigh, Hy3 has `no_think` for none, Kimi K3 reads `thinking` and `thinking_effort`, MiniMax M3
`thinking_mode`, Seed-OSS `thinking_budget`, and Nemotron Nano looks for `/no_think` in the system
message. `control_probing` finds these when a model is loaded; here a request is translated to them.
What a template cannot do becomes the nearest that it can. The mapping depends on the template alone,
so the prompt of a conversation does not change from one turn to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The template variables that requests of all APIs are translated to.
EFFORT, SWITCH, BUDGET = "reasoning_effort", "enable_thinking", "thinking_budget"
# Another common name of the switch, read for it also where a template has only the other one.
OTHER_SWITCH = "thinking"
LADDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OFF_WORDS = ("none", "no_think", "nothink", "no_thinking", "off", "disabled")
# Of templates that read a number of tokens and no effort. More than these is no budget.
EFFORT_BUDGETS: Mapping[str, int] = {"minimal": 512, "low": 1_024, "medium": 4_096, "high": 16_384}
EFFORT_NAME = re.compile(
    r"(?:\w+_)?effort(?:_level)?|(?:reasoning|thinking|think)_(?:level|strength)"
)
BUDGET_NAME = re.compile(
    r"(?:\w+_)?(?:reasoning|thinking|think)_(?:token_)?budget(?:_tokens)?|budget_tokens"
    r"|max_(?:reasoning|thinking|think)_(?:tokens|length)"
)
# An argument of transformers' own beside the variables of a template.
_NO_VARIABLE = "continue_final_message"


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

    def value_of(self, level: object) -> object:
        """The value to set for a requested level; None for a word that means nothing here."""
        if not isinstance(level, str) or level in self.values:
            return level
        place = rank(level)
        return None if place is None else self.mapping[LADDER[place]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Variables to render with, a word for the system message, and what differs from the request."""

    variables: Mapping[str, Any]
    changes: tuple[str, ...] = ()
    word: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The controls of one template.

    off, on: the variables that turn thinking off and on; empty if none does
    off_word: a word in the system message that turns thinking off, where no variable does
    always_thinks: the template raises when thinking is turned off
    budget: the variable that holds a number of tokens for the thinking
    """

    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    off_word: str | None = None
    always_thinks: bool = False
    efforts: tuple[Efforts, ...] = ()
    budget: str | None = None

    def summary(self) -> dict[str, Any]:
        """What clients can choose, in the words of the APIs; empty if there is no choice."""
        known = [value for each in self.efforts for value in each.values if value in LADDER[1:]]
        default = next((each.default for each in self.efforts if each.default in known), None)
        is_optional = bool(self.off or self.off_word)
        if not (known or is_optional or self.budget):
            return {}
        return {
            "can_be_off": is_optional,
            "efforts": sorted(set(known), key=LADDER.index),
            "default_effort": default,
            "budget": self.budget is not None,
        }

    def attempts(self, requested: Mapping[str, Any]) -> Iterator[Attempt]:
        """The request's variables as the template accepts them, then without an effort, then without any.

        The later attempts are for templates that refuse a value only in some conversations.
        """
        mapped = self._mapped(requested)
        yield mapped
        names = {EFFORT, *(each.variable for each in self.efforts)} & mapped.variables.keys()
        if names:
            others = {k: v for k, v in mapped.variables.items() if k not in names}
            values = ", ".join(sorted({str(mapped.variables[name]) for name in names}))
            change = f"effort {values[:64]} is left out, which the template refuses"
            yield Attempt(others, (change,), mapped.word)
        kept = {k: v for k, v in mapped.variables.items() if k == _NO_VARIABLE}
        if mapped.variables.keys() - names - kept.keys():
            left_out = ", ".join(sorted(mapped.variables.keys() - kept.keys()))[:200]
            yield Attempt(kept, (f"{left_out}: left out, which the template refuses",))

    def _mapped(self, requested: Mapping[str, Any]) -> Attempt:
        variables = dict(requested)
        changes: list[str] = []
        thinks = self._thinks(requested)
        if thinks is False and self.always_thinks:
            variables[SWITCH] = True
            changes.append("thinking stays on")
        elif thinks is not None:
            variables |= {SWITCH: thinks, **(self.on if thinks else self.off)}
        for efforts in self.efforts:
            variables.pop(efforts.variable, None)
            level = self._level(efforts, requested, thinks=thinks)
            value = efforts.value_of(level)
            if value is None and thinks:
                value = self.on.get(efforts.variable)
            if value is not None:
                variables[efforts.variable] = value
            has_effect = thinks is not False or not self._has_switch
            if level is not None and value != level and value not in OFF_WORDS and has_effect:
                changes.append(f"effort {_shown(level)} is {_described(efforts, value)}")
        if not self.efforts and _is_unknown(requested.get(EFFORT)):
            changes.append(f"effort {_shown(variables.pop(EFFORT))} is left out")
        changes += self._set_budget(variables, requested, thinks=thinks)
        word = self.off_word if thinks is False else None
        return Attempt(variables, tuple(dict.fromkeys(changes)), word)

    @property
    def _has_switch(self) -> bool:
        """True if thinking is turned off by something else than an effort."""
        return bool(self.off_word or self.off.keys() - {each.variable for each in self.efforts})

    def _thinks(self, requested: Mapping[str, Any]) -> bool | None:
        thinks = requested.get(SWITCH, requested.get(OTHER_SWITCH))
        if isinstance(thinks, bool):
            return thinks
        return False if rank(requested.get(EFFORT)) == 0 else None

    def _level(self, efforts: Efforts, requested: Mapping[str, Any], *, thinks: object) -> object:
        """Return the requested level. Without a switch, the effort alone can turn thinking off."""
        if thinks is False and not self._has_switch:
            return "none"
        return requested.get(EFFORT, requested.get(efforts.variable))

    def _set_budget(
        self, variables: dict[str, Any], requested: Mapping[str, Any], *, thinks: object
    ) -> Iterator[str]:
        """Set the variable of the budget. Where the template reads no effort, this is one as well."""
        budget = requested.get(BUDGET)
        if self.budget != BUDGET:
            variables.pop(BUDGET, None)
        if self.budget is None or thinks is False:
            return
        if budget is not None:
            variables[self.budget] = budget
        elif self.efforts or requested.get(self.budget) is not None:
            return
        elif (tokens := EFFORT_BUDGETS.get(str(requested.get(EFFORT)))) is not None:
            variables[self.budget] = tokens
            yield f"effort {requested[EFFORT]} is a budget of {tokens} tokens"


def with_word(messages: Sequence[Mapping[str, Any]], word: str) -> list[Mapping[str, Any]]:
    """The messages with a word at the end of the system message, which is added if there is none."""
    first, *others = messages
    if first.get("role") != "system":
        return [{"role": "system", "content": word}, *messages]
    content = first.get("content") or ""
    if isinstance(content, str):
        return [{**first, "content": f"{content} {word}".lstrip()}, *others]
    return [{**first, "content": [*content, {"type": "text", "text": f" {word}"}]}, *others]


def has_controls(variables: Mapping[str, Any]) -> bool:
    """True if any of the variables controls thinking."""
    switches = {SWITCH, OTHER_SWITCH}
    return any(
        name in switches or EFFORT_NAME.fullmatch(name) or BUDGET_NAME.fullmatch(name)
        for name in variables
    )


def rank(level: object) -> int | None:
    """The place of a word on the ladder; None if it has none."""
    word = level.strip().casefold() if isinstance(level, str) else ""
    if word in OFF_WORDS:
        return 0
    return LADDER.index(word) if word in LADDER else None


def _is_unknown(level: object) -> bool:
    return isinstance(level, str) and rank(level) is None


def _shown(level: object) -> str:
    return str(level)[:64]


def _described(efforts: Efforts, value: object) -> str:
    if value is not None:
        return str(value)
    return "the template's default" if efforts.values else "left out"
