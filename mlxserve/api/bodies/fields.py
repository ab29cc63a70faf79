"""Fields that clients may write in several ways, normalised to one.

Every function takes the value sent and returns the value the body's model holds, or raises
ValueError with a message that continues the field's name.
"""

from __future__ import annotations

from typing import TypeAlias

Prompt: TypeAlias = str | tuple[int, ...]

MAX_NAME_LENGTH = 256
MAX_PARTS = 1_000
MAX_PROMPTS = 1_024
MAX_LOGIT_BIASES = 1_024
TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort")
_TEXT_PARTS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
}


def stop_strings(value: object) -> object:
    if value is None:
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
    """A string, a list of token ids, or a list of either kind of prompt."""
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


def text(value: object) -> object:
    """A message's content as one string: its text parts, concatenated."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} parts are allowed, got {len(value)}")
    return "".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError('each part must be an object such as {"type": "text", "text": "..."}')
    kind = part["type"]
    if kind not in _TEXT_PARTS:
        raise ValueError(f"parts of type {kind[:40]!r} are not supported; only text is")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a {kind} part needs a string named {_TEXT_PARTS[kind]!r}")
    return text


def items(value: object) -> object:
    """The items of a response's input; a string is one user message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return value


def template_kwargs(value: object) -> dict[str, bool | str]:
    """Template variables: only those in `TEMPLATE_KWARGS` can be set by a client."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    for name, setting in value.items():
        if name not in TEMPLATE_KWARGS:
            raise ValueError(
                f"{name[:40]!r} is not allowed; allowed are {', '.join(TEMPLATE_KWARGS)}"
            )
        if not isinstance(setting, (bool, str)) or len(str(setting)) > MAX_NAME_LENGTH:
            raise ValueError(f"{name} must be true, false or a short string")
    return value
