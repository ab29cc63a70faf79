"""The field `keep_alive` of request bodies."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field, PlainValidator

from mlxserve.chat.registry.keep_alive import MAX_SECONDS, keep_alive_seconds
from mlxserve.core.errors import InvalidConfig

MAX_LENGTH = 64  # characters; Go's longest duration has 24


def _seconds(value: object) -> float | None:
    """Read a duration in seconds; inf for ever."""
    if value is None:
        return None
    if isinstance(value, str) and len(value) > MAX_LENGTH:
        raise ValueError(f"must have at most {MAX_LENGTH} characters, got {len(value)}")
    try:
        return keep_alive_seconds(value)
    except InvalidConfig as error:
        raise ValueError(str(error).removeprefix("keep_alive ")) from error


_Text: TypeAlias = Annotated[str, Field(max_length=MAX_LENGTH)]
# A longer time, and a negative one, is for ever.
_Number: TypeAlias = Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)]
KeepAlive: TypeAlias = Annotated[
    float | None, PlainValidator(_seconds, json_schema_input_type=_Text | _Number | None)
]
