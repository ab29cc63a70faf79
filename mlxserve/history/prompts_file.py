"""Saved prompts in a file of exported chats, beside the chats: `"prompts": [{"name": ..., ...}]`.

A file may be of anybody: every value's type is checked. Values of sampling that are out of bounds are
refused when the prompt is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlxserve.history.saved_prompts import (
    MAX_NAME,
    PromptRefused,
    SamplingValues,
    SavedPrompt,
    SavedPrompts,
)
from mlxserve.system.terminal_text import one_line
from mlxserve.system.well_formed import well_formed

PROMPTS = "prompts"  # member of our own exports, beside the chats
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
_EFFORT = "effort"
_MAX_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as a file has it."""

    name: str
    system: str
    sampling: SamplingValues

    def is_same(self, prompt: SavedPrompt) -> bool:
        return (self.system, self.sampling) == (prompt.system, prompt.sampling)


def as_members(prompts: Iterable[SavedPrompt]) -> str:
    """Write prompts as the elements of a JSON array."""
    kept = (
        {"name": each.name, "system": each.system, "sampling": dict(each.sampling)}
        for each in prompts
    )
    return ",\n".join(json.dumps(each, ensure_ascii=False) for each in kept)


def prompts_in(content: Any) -> list[Any]:
    """Return the prompts in a parsed file, each for `read_prompt`; none in files of others."""
    prompts = content.get(PROMPTS) if isinstance(content, dict) else None
    return prompts if isinstance(prompts, list) else []


def read_prompt(value: Any) -> ReadPrompt:
    """Read one prompt. Raises PromptRefused."""
    prompt = value if isinstance(value, dict) else {}
    name, system = prompt.get("name"), prompt.get("system", "")
    if not isinstance(name, str) or not name.strip():
        raise PromptRefused("A saved prompt has no name.")
    shown = one_line(well_formed(name), MAX_NAME)
    sampling = prompt.get("sampling", {})
    if not isinstance(system, str) or not isinstance(sampling, dict):
        raise PromptRefused(f"The saved prompt {shown!r} has no text, or no values of sampling.")
    for key, number in sampling.items():
        if not (_is_effort(number) if key == _EFFORT else key in _NUMBERS and _is_number(number)):
            raise PromptRefused(f"The saved prompt {shown!r} has a wrong value in {key[:40]!r}.")
    return ReadPrompt(shown, well_formed(system), sampling)


def import_prompt(saved: SavedPrompts, prompt: ReadPrompt) -> bool:
    """Save a prompt; False for one that is here already.

    Another one of the same name stays as it is, and the imported one gets a number after its name.
    Raises PromptRefused and StoreError.
    """
    here = {each.name: each for each in saved.all()}
    number, name = 1, prompt.name
    while (other := here.get(name)) is not None:
        if prompt.is_same(other):
            return False
        number += 1
        suffix = f" ({number})"
        name = prompt.name[: MAX_NAME - len(suffix)] + suffix
    saved.save(name, prompt.system, prompt.sampling)
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < _MAX_NUMBER


def _is_effort(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isascii()
