"""Fields about tools: which tools there are, and which may be called.

The endpoints spell them differently; all become an `AssistantTurn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator

from mlxserve.api.bodies.request_body import StrictModel
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
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self) -> dict[str, Any]:
        """The function in the format of chat templates."""
        return definition_of(self.name, self.description, self.parameters)


class FunctionTool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition

    def definition(self) -> dict[str, Any]:
        return self.function.definition()


Tools: TypeAlias = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The field `tool_choice`.

    names: the tools to choose from; None for all
    is_one: a single tool was named
    sent: the value as the client sent it
    """

    mode: ToolChoice = ToolChoice.AUTO
    names: tuple[str, ...] | None = None
    is_one: bool = False
    sent: Any = "auto"


def choice(value: object) -> ChosenTools | None:
    """Read a mode, one tool, or a list of allowed tools. Only the chat endpoint nests the last two."""
    if value is None:
        return None
    if isinstance(value, str) and value in tuple(ToolChoice):
        return ChosenTools(ToolChoice(value), sent=value)
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind in ("function", "custom"):
        return ChosenTools(ToolChoice.REQUIRED, (_name_of(value),), is_one=True, sent=value)
    if isinstance(value, dict) and kind == "allowed_tools":
        return replace(_allowed(value.get("allowed_tools", value)), sent=value)
    raise ValueError("must be 'none', 'auto', 'required', a function, or allowed_tools")


def _allowed(value: object) -> ChosenTools:
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else ("", [])
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise ValueError("allowed_tools needs a mode, 'auto' or 'required', and a list of tools")
    return ChosenTools(ToolChoice(mode), tuple(_name_of(tool) for tool in tools[:MAX_TOOLS]))


def _name_of(value: object) -> str:
    inner = value.get("function", value) if isinstance(value, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise ValueError("a function is chosen by its `name`")
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
