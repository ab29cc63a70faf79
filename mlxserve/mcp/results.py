"""CallResult: a tool's result as text for the model, bounded in length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.system.well_formed import well_formed

MAX_RESULT = 20_000  # characters, some 5,000 tokens
_HEAD = 15_000  # start of a longer result; the rest is its end


@dataclass(frozen=True, slots=True)
class CallResult:
    """`is_error`: the text says what failed, in the tool or on the way to it."""

    text: str
    is_error: bool = False


def shortened(text: str) -> str:
    """Return the start and the end of a text that is too long."""
    if len(text) <= MAX_RESULT:
        return text
    left_out = len(text) - MAX_RESULT
    tail = text[len(text) - (MAX_RESULT - _HEAD) :]
    return f"{text[:_HEAD]}\n… ({left_out:,} characters are left out here) …\n{tail}"


def text_of(content: Sequence[Any], structured: Any) -> str:
    """Join the parts of an MCP result: texts verbatim, others described."""
    parts = [_part(part) for part in content]
    if not parts and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    return shortened(well_formed("\n".join(parts))) or "(no output)"


def _part(part: Any) -> str:
    match part.type:
        case "text":
            return str(part.text)
        case "resource" if hasattr(part.resource, "text"):
            return str(part.resource.text)
        case "resource_link":
            return f"(a link to {part.uri})"
        case "image" | "audio":
            return f"({part.type} of type {part.mime_type}, which is not shown to the model)"
        case _:
            return f"({part.type}, which is not shown to the model)"
