"""Fields about thinking: whether a model thinks, with how much effort, and for how many tokens.

The APIs and their clients spell them differently. All spellings are read on all routes and become
template variables, which `text.controls` maps to those that the template has. No word is refused.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from mlxserve.api.bodies.fields import TemplateKwargs, template_kwargs
from mlxserve.api.bodies.request_body import RequestBody, StrictModel
from mlxserve.text.controls import BUDGET, EFFORT, LADDER, OFF_WORDS, OTHER_SWITCH, SWITCH, rank

MAX_BUDGET = 2**31 - 1
_MAX_WORD = 64  # characters
_LOW = LADDER.index("low")
_DEFAULTS = ("auto", "default")  # words that leave the choice to the model


def effort_word(value: object) -> str | None:
    """The effort as a word in lower case, whatever a client writes; None leaves it to the model."""
    if isinstance(value, bool):
        return "medium" if value else "none"
    word = "" if value is None else str(value).strip().casefold()[:_MAX_WORD]
    return None if word in ("", *_DEFAULTS) else word


def _think(value: object) -> bool | str | None:
    return value if isinstance(value, bool) else effort_word(value)


def _object_of(name: str, value: object) -> object:
    """An object where a client wrote its only member."""
    return {name: value} if isinstance(value, (str, int, float)) else value


def thinking_options(value: object) -> object:
    """An object for the field `thinking`, where a client wrote a word or a switch."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    return _object_of("type", value)


_WORDS = WithJsonSchema({"type": "string", "enum": list(LADDER)})
Budget: TypeAlias = Annotated[int, Field(ge=0, le=MAX_BUDGET)]
Effort: TypeAlias = Annotated[str | None, PlainValidator(effort_word), _WORDS]
Think: TypeAlias = Annotated[
    bool | str | None,
    PlainValidator(_think),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": list(LADDER)}]}),
]
TemplateKwargsField: TypeAlias = Annotated[TemplateKwargs, PlainValidator(template_kwargs)]


class ReasoningOptions(StrictModel):
    """Responses' field, which other servers and their clients also have in chat completions."""

    effort: Effort = None
    enabled: bool | None = None  # OpenRouter's
    max_tokens: Budget | None = None  # OpenRouter's
    summary: Annotated[str, Field(max_length=_MAX_WORD)] | None = None  # without effect

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """A level alone, or on and off, as some clients write it."""
        return {"enabled": value} if isinstance(value, bool) else _object_of("effort", value)

    @property
    def level(self) -> str | None:
        if self.enabled is None:
            return self.effort
        return (self.effort or "medium") if self.enabled else "none"


class ThinkingOptions(StrictModel):
    """Anthropic's field, which the APIs of GLM and Kimi have in chat completions."""

    type: Annotated[str, Field(max_length=_MAX_WORD)] | None = None
    budget_tokens: Budget | None = None

    @property
    def switch(self) -> bool | None:
        if self.type is None or self.type in _DEFAULTS:
            return None
        return self.type not in OFF_WORDS


class ThinkingFields(RequestBody):
    """The fields of all routes whose answers may think."""

    chat_template_kwargs: TemplateKwargsField = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: Effort = None
    think: Think = None
    thinking: Annotated[ThinkingOptions | None, BeforeValidator(thinking_options)] = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None

    @property
    def effort(self) -> str | None:
        """The dialect's own field comes first, then the others."""
        think = self.think if isinstance(self.think, str) else None
        level = self.reasoning.level if self.reasoning is not None else None
        return self.reasoning_effort or level or think

    @property
    def switch(self) -> bool | None:
        """False if any field turns thinking off, True if one turns it on."""
        chosen = (
            self.enable_thinking,
            self.think if isinstance(self.think, bool) else None,
            self.thinking.switch if self.thinking is not None else None,
            False if self.budget == 0 else None,
        )
        return False if False in chosen else True if True in chosen else None

    @cached_property
    def budget(self) -> int | None:
        """Tokens of thinking."""
        budgets = (
            self.thinking_budget,
            self.thinking_token_budget,
            self.thinking.budget_tokens if self.thinking is not None else None,
            self.reasoning.max_tokens if self.reasoning is not None else None,
        )
        return next((budget for budget in budgets if budget is not None), None)

    @cached_property
    def template_kwargs(self) -> TemplateKwargs:
        """Template variables. Those in `chat_template_kwargs` take precedence."""
        effort = self.effort
        kwargs = {} if effort is None else thinking_kwargs(effort)
        if (switch := self.switch) is not None:
            kwargs[SWITCH] = switch and kwargs.get(SWITCH, True)
        if self.budget:
            kwargs[BUDGET] = self.budget
        own = self.chat_template_kwargs
        if isinstance(own.get(OTHER_SWITCH), bool):
            kwargs[SWITCH] = own[OTHER_SWITCH]
        return {**kwargs, **own}

    @property
    def forced_budget(self) -> int | None:
        """0 if thinking is off: it then ends at once even if the template ignores the variable."""
        is_off = self.template_kwargs.get(SWITCH) is False
        return 0 if self.budget is None and is_off else self.budget


def thinking_kwargs(effort: str) -> TemplateKwargs:
    """Template variables for an effort. A word that is not on the ladder turns nothing on or off."""
    kwargs: TemplateKwargs = {}
    if (place := rank(effort)) is not None:
        kwargs[SWITCH] = place >= _LOW
    if place != 0:
        kwargs[EFFORT] = effort
    return kwargs
