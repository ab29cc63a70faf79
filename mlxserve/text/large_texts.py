"""Large texts, rendered and encoded in a process of their own.

Encoding megabytes takes seconds, in which a tokenizer can do nothing else. `LargeTexts` is the
tokenizer's side; `LargeTextWorker` has a second copy of the tokenizer, in a helper process that starts
with the first large text.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.errors import HelperKilled, JobFailed
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.text.templates import RenderedTooLong

log = logging.getLogger("mlxserve.text")

SECONDS = 60.0  # 32 MB, the largest request, take 10 to 20 s
MEMORY = 2 << 30  # bytes: a token takes about 50 while it is made


class LargeTexts:
    """The helper process of one tokenizer. Methods block; texts are processed one by one."""

    def __init__(self, path: Path, eos_token_ids: Sequence[int]) -> None:
        self._helper = Helper(
            "mlxserve.text.large_text_worker:LargeTextWorker",
            str(path),
            list(eos_token_ids),
            name="large texts",
            memory=MEMORY,
            niceness=BEHIND_THE_ENGINE,
        )

    def encode(self, text: str) -> list[int]:
        """Like `Tokenizer.encode`. Raises InvalidRequest."""
        try:
            return self._call("encode", text)
        except JobFailed as error:
            log.error("A large text cannot be encoded: %s", error)
            message = f"The text cannot be encoded: the tokenizer failed ({error.type_name})."
            raise InvalidRequest(message) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        max_characters: int | None,
    ) -> list[int]:
        """Like `Tokenizer.render_here`. Raises InvalidRequest, TemplateError, RenderedTooLong."""
        try:
            return self._call("render", messages, tools, variables, max_characters)
        except JobFailed as error:
            raise TemplateError(error.message or error.type_name) from error

    def close(self) -> None:
        self._helper.close()

    def _call(self, method: str, *arguments: object) -> list[int]:
        try:
            reply = self._helper.call_twice(method, *arguments, seconds=SECONDS)
        except HelperKilled as error:
            blameless = error.without_blame("The process for large texts", was_tried_twice=True)
            raise blameless or InvalidRequest(
                f"The text cannot be encoded: that {error}."
            ) from error
        if isinstance(reply, int):
            raise RenderedTooLong(reply)
        ids = array("i")
        ids.frombytes(reply)
        return ids.tolist()
