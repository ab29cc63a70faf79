"""Yield every object in the value, with its depth."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxserve.text.template_worker import TemplateWorker
from mlxserve.text.templates import RenderedTooLong
from mlxserve.text.tokenizer import Tokenizer


class LargeTextWorker:
    """One model's tokenizer. Token ids are returned as bytes of 32-bit integers."""

    def __init__(self, path: str, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = Tokenizer(Path(path), eos_token_ids, renderer=TemplateWorker())

    def encode(self, text: str) -> bytes:
        return array("i", self._tokenizer.encode_here(text)).tobytes()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        max_characters: int | None,
    ) -> bytes | int:
        """Return the ids, or the number of characters of a text that is too long."""
        try:
            ids = self._tokenizer.render_here(messages, tools, variables, max_characters)
        except RenderedTooLong as error:
            return error.num_characters
        return array("i", ids).tobytes()
