"""Fields about tools: which tools there are, and which may be called.

The endpoints spell them differently; each reads all spellings, and all become an `AssistantTurn`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, LongText
from mlxserve.api.bodies.request_body import StrictModel
from mlxserve.api.bodies.spellings import nested_tool
from mlxserve.api.errors import invalid_value
from mlxserve.text.parsing.turn import AssistantTurn, ToolChoice

MAX_TOOLS = 512
Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def definition_of(
    name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Build a tool in the format of chat templates."""
    members = {"name": name, "description": description, "parameters": parameters}
    known = {field: value for field, value in members.items() if value is not None}
    return {"type": "function", "function": known}


class FunctionDefinition(StrictModel):
    """A callable function. Arguments always follow the schema, with or without `strict`."""

    name: Name
    description: LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self) -> dict[str, Any]:
        """The function in the format of chat templates."""
        return definition_of(self.name, self.description, self.parameters)


class FunctionTool(StrictModel):
    """A function, or a tool that its provider runs, which is left out."""

    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] = "function"
    function: FunctionDefinition | None = None

    @model_validator(mode="after")
    def _has_its_function(self) -> Self:
        if self.type == "function" and self.function is None:
            raise ValueError("a function tool needs `function`, an object with its name")
        return self


Tools: TypeAlias = Annotated[
    list[Annotated[FunctionTool, BeforeValidator(nested_tool)]],
    Field(fail_fast=True, max_length=MAX_TOOLS),
]


def definitions_of(tools: Iterable[FunctionTool] | None) -> list[dict[str, Any]]:
    """The functions in the format of chat templates."""
    return [tool.function.definition() for tool in tools or () if tool.function is not None]


def left_out(kinds: Iterable[str]) -> list[str]:
    """Name the types of tools that are left out, for the reply's warning."""
    return [f"tools[] of type {kind}" for kind in sorted(set(kinds))]


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The field `tool_choice`.

    names: the tools to choose from; None for all
    is_one: a single tool was named
    is_parallel: several calls in one answer are allowed; None if the field does not say
    sent: the value as the client sent it
    """

    mode: ToolChoice = ToolChoice.AUTO
    names: tuple[str, ...] | None = None
    is_one: bool = False
    is_parallel: bool | None = None
    sent: Any = "auto"


# Anthropic's and Mistral's words.
_MODES: Mapping[object, ToolChoice] = {
    **{str(mode): mode for mode in ToolChoice},
    "any": ToolChoice.REQUIRED,
}
_NAMING = (None, "function", "custom", "tool")


def choice(value: object) -> ChosenTools | None:
    """Read a mode, one tool, or a list of allowed tools. Only the chat endpoint nests the last two."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else value
    if isinstance(kind, str) and kind in _MODES:
        return ChosenTools(_MODES[kind], is_parallel=_is_parallel(value), sent=value)
    if isinstance(value, dict) and kind in _NAMING:
        names = (_name_of(value),)
        return ChosenTools(ToolChoice.REQUIRED, names, is_one=True, sent=value)
    if isinstance(value, dict) and kind == "allowed_tools":
        return replace(_allowed(value.get("allowed_tools", value)), sent=value)
    raise ValueError(
        "must be 'none', 'auto', 'required' (or 'any'), a tool by its name, or allowed_tools"
    )


def _is_parallel(value: object) -> bool | None:
    is_single = value.get("disable_parallel_tool_use") if isinstance(value, dict) else None
    if is_single is not None and not isinstance(is_single, bool):
        raise ValueError("disable_parallel_tool_use must be true or false")
    return None if is_single is None else not is_single


def _allowed(value: object) -> ChosenTools:
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else ("", [])
    if mode not in ("auto", "required", "any") or not isinstance(tools, list) or not tools:
        raise ValueError("allowed_tools needs a mode, 'auto' or 'required', and a list of tools")
    return ChosenTools(_MODES[mode], tuple(_name_of(tool) for tool in tools[:MAX_TOOLS]))


def _name_of(value: object) -> str:
    inner = value.get("function", value) if isinstance(value, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise ValueError("a tool is chosen by its `name`")
    return name


ToolChoiceField: TypeAlias = Annotated[ChosenTools | None, PlainValidator(choice)]


def turn_of(
    tools: Sequence[Mapping[str, Any]],
    choice: ChosenTools | None,
    *,
    parallel: bool | None,
    thinking_budget: int | None,
) -> AssistantTurn:
    """Build the turn that these fields describe. Raises ApiError 400 for tools not in `tools`."""
    choice = choice or ChosenTools()
    parallel = parallel if choice.is_parallel is None else choice.is_parallel
    tools = tools if choice.names is None else _only(tools, choice.names)
    if choice.mode is ToolChoice.REQUIRED and not tools:
        raise invalid_value("tool_choice", "there are no `tools` to choose from")
    return AssistantTurn(
        tools=tuple(tools),
        tool_choice=choice.mode,
        tool_name=choice.names[0] if choice.is_one and choice.names else None,
        # A single named tool is called once.
        parallel_tool_calls=parallel is not False and not choice.is_one,
        thinking_budget=thinking_budget,
    )


def _only(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    known = {tool["function"]["name"] for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise invalid_value("tool_choice", f"{missing[0][:100]!r} is not among `tools`")
    return [tool for tool in tools if tool["function"]["name"] in names]
