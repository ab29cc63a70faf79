"""Probes: small conversations that show how a chat template treats them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Message: TypeAlias = dict[str, Any]
Tools: TypeAlias = list[dict[str, Any]]


class Probe(NamedTuple):
    """A conversation with its tools and variables; thinking is on by default, by every name."""

    messages: list[Message]
    tools: Tools | None = None
    variables: Mapping[str, Any] | None = None


# Renders each of them; None where the template raised.
RenderEach: TypeAlias = Callable[[Sequence[Probe]], Sequence[str | None]]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "zqtool",
        "description": "Looks it up.",
        "parameters": {
            "type": "object",
            "properties": {"zqkey": {"type": "string", "description": "What."}},
            "required": ["zqkey"],
        },
    },
}
