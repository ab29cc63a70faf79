"""Fields that clients may write in several ways, normalised to one.

Every function takes the value sent and returns the value for the body's model, or raises ValueError
with a message that continues the field's name.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field
from pydantic.fields import FieldInfo

from mlxserve.core.sampling_params import RANGES

Prompt: TypeAlias = str | tuple[int, ...]
TemplateKwargs: TypeAlias = dict[str, Any]

MAX_NAME_LENGTH = 256
MAX_MODEL_LENGTH = 4_096  # characters of a model's name, which may be a path
MAX_ID_LENGTH = 64 << 10  # of calls; some clients keep data of other servers in them
MAX_TEXT = 32 << 20  # characters; a body has as many bytes
MAX_TOKEN_ID = 2**31 - 1

ModelName: TypeAlias = Annotated[str, Field(max_length=MAX_MODEL_LENGTH)]
Id: TypeAlias = Annotated[str, Field(max_length=MAX_ID_LENGTH)]
LongText: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Index: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
MAX_PROMPTS = 1_024
MAX_DIMENSIONS = 65_536  # of a vector
MAX_LOGIT_BIASES = 1_024


def bounded(name: str) -> FieldInfo:
    """The range of a number of `SamplingParams`, which checks it; here it is only shown."""
    low, high = RANGES[name]
    described: FieldInfo = Field(json_schema_extra={"minimum": low, "maximum": high})
    return described


def stop_strings(value: object) -> object:
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def token_biases(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} tokens are allowed, got {len(value)}")
    return {_token_id(key): bias for key, bias in value.items()}


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ValueError(f"{text[:40]!r} is not a token id")
    return int(text)


def prompts(value: object) -> tuple[Prompt, ...]:
    """Read a string, a list of token ids, or a list of either kind of prompt."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if _is_token_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed, got {len(value)}")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and _is_token_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise ValueError("mixes kinds, or contains something that is neither text nor a token id")


def _is_token_ids(value: list[object]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in value)


def template_kwargs(value: object) -> TemplateKwargs:
    """Template variables; null is none. Which ones a template reads is known when it is rendered."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return {name: setting for name, setting in value.items() if setting is not None}
