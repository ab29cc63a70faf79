"""Tools, calls and messages as the clients of neighbouring APIs write them.

Each function takes a value of any spelling and returns one for a model to validate. Values that it
does not know stay as they are, and the model refuses or reports them.
"""

from __future__ import annotations

import json
from typing import Any

_MEMBERS = ("name", "description", "parameters", "strict")


def flat_tool(value: object) -> object:
    """A tool that holds its function's members and its schema as `parameters`, as in Responses."""
    if not isinstance(value, dict):
        return value
    function = value.get("function")
    tool = {**value, **function} if isinstance(function, dict) else {**value}
    tool.pop("function", None)
    schema = tool.pop("input_schema", None)
    if schema is None:
        return tool
    # A tool that has a schema is a function, also where Anthropic calls it `custom`.
    kind = "function" if tool.get("type") in (None, "custom") else tool["type"]
    return {**tool, "type": kind, "parameters": schema}


def nested_tool(value: object) -> object:
    """A tool whose function is an object of its own, as in chat completions."""
    if not isinstance(value, dict) or isinstance(value.get("function"), dict):
        return value
    tool = flat_tool(value)
    assert isinstance(tool, dict)
    if "name" not in tool or tool.get("type") not in (None, "function", "custom"):
        return tool
    function = {name: tool.pop(name) for name in _MEMBERS if name in tool}
    return {**tool, "type": "function", "function": function}


def anthropic_tool(value: object) -> object:
    """A tool whose schema is `input_schema`, as in Anthropic's API."""
    tool = flat_tool(value)
    if isinstance(tool, dict) and "parameters" in tool:
        schema = tool.pop("parameters")
        return {**tool, "input_schema": schema}
    return tool


def nested_call(value: object) -> object:
    """A call whose name and arguments are in `function`. A custom tool's text is its only argument."""
    if not isinstance(value, dict) or isinstance(value.get("function"), dict):
        return value
    call = {**value}
    custom = call.pop("custom", None)
    if isinstance(custom, dict):
        arguments = {"input": custom.get("input") or ""}
        return {**call, "function": {"name": custom.get("name"), "arguments": arguments}}
    if isinstance(call.get("name"), str):
        function = {name: call.pop(name) for name in ("name", "arguments") if name in call}
        return {**call, "function": function}
    return value


def chat_message(value: object) -> object:
    """A message with `tool_calls` and results of the role `tool`.

    Earlier versions of OpenAI's API had one `function_call`, and results of the role `function`.
    """
    if not isinstance(value, dict):
        return value
    message = {**value}
    if message.get("role") == "function":
        message["role"] = "tool"
    call = message.get("function_call")
    if isinstance(call, dict) and not message.get("tool_calls"):
        del message["function_call"]
        message["tool_calls"] = [{"function": call}]
    return message


def input_items(value: object) -> object:
    """The items of a response's input. A text is a user message; messages of chat completions pass."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return [item for sent in value for item in _items_of(sent)]


def _items_of(sent: object) -> list[Any]:
    message = chat_message(sent) if isinstance(sent, dict) and "role" in sent else sent
    if not isinstance(message, dict):
        return [message]
    if message.get("role") == "tool":
        output = {"call_id": message.get("tool_call_id"), "output": message.get("content")}
        return [{"type": "function_call_output", **output}]
    calls = message.pop("tool_calls", None) if message is not sent else None
    if not isinstance(calls, list):
        return [message]
    has_text = bool(message.get("content"))
    return [*([message] if has_text else ()), *map(_call_item, calls)]


def _call_item(value: object) -> object:
    call = nested_call(value)
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    members = {name: function.get(name) for name in ("name", "arguments")}
    return {"type": "function_call", "call_id": call.get("id"), **members}


def parts(value: object) -> object:
    """A text or a list of parts: any other value, such as a tool's result, is JSON text."""
    if isinstance(value, dict):
        return [value] if isinstance(value.get("type"), str) else as_json(value)
    if isinstance(value, list):
        return [
            part if _is_part(part) else {"type": "text", "text": as_json(part)} for part in value
        ]
    return value if isinstance(value, str) else as_json(value)


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def as_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
