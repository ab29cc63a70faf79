"""Chat templates, rendered where they can be killed.

A template is a program from a model's folder. transformers' sandbox keeps it from the outside, but
not from running without end or taking all memory. So transformers prepares messages and encodes the
result in this process, and renders in a helper process (`render_in_helper`) that all tokenizers
share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from jinja2 import TemplateError

from mlxserve.helpers.errors import HelperKilled, JobFailed
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper

# Ten thousand messages take a quarter of a second, and a busy machine several times as long.
SECONDS = 5.0
MEMORY = 256 << 20  # bytes
# Of the text that this thread renders; None for no limit.
_max_characters: ContextVar[int | None] = ContextVar("max_characters", default=None)
# Held by this thread, and of no use while it waits for a renderer.
_idle_lock: ContextVar[threading.Lock | None] = ContextVar("idle_lock", default=None)


class RenderedTooLong(Exception):
    """The rendered text has more characters than allowed. It was not encoded."""

    def __init__(self, num_characters: int) -> None:
        super().__init__(f"{num_characters} characters")
        self.num_characters = num_characters


@contextmanager
def at_most(characters: int | None) -> Iterator[None]:
    """Raise RenderedTooLong for longer rendered texts in this block."""
    token = _max_characters.set(characters)
    try:
        yield
    finally:
        _max_characters.reset(token)


def check_length(text: str) -> str:
    """Return the text. Raises RenderedTooLong."""
    limit = _max_characters.get()
    if limit is not None and len(text) > limit:
        raise RenderedTooLong(len(text))
    return text


@contextmanager
def released_while_rendering(lock: threading.Lock) -> Iterator[None]:
    """Release the lock while a template is rendered in this block on this thread."""
    token = _idle_lock.set(lock)
    try:
        yield
    finally:
        _idle_lock.reset(token)


@contextmanager
def _released(lock: threading.Lock) -> Iterator[None]:
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


class TextRenderer(Protocol):
    """Renders chat templates, in this process or another."""

    def render(self, arguments: Mapping[str, Any]) -> str:
        """`arguments`: those of transformers' `render_jinja_template`. Raises TemplateError."""

    def render_each(self, arguments: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Render each; None for one at which the template raises."""

    def literal_text(self, template: str) -> str:
        """Return a template's literal text. Raises TemplateError."""

    def variables(self, template: str) -> Mapping[str, Sequence[str]]:
        """Map the names that a template reads to the words it compares them with.

        Raises TemplateError.
        """


class HelperRenderer:
    """Renders in a helper process, which starts with the first template."""

    def __init__(self) -> None:
        self._helper = Helper(
            "mlxserve.text.template_worker:TemplateWorker",
            name="chat templates",
            memory=MEMORY,
            niceness=BEHIND_THE_ENGINE,
        )
        self._literals: dict[str, str] = {}

    def render(self, arguments: Mapping[str, Any]) -> str:
        text: str = self._call("render", dict(arguments))
        return text

    def render_each(self, arguments: Sequence[Mapping[str, Any]]) -> list[str | None]:
        texts: list[str | None] = self._call("render_each", [dict(each) for each in arguments])
        return texts

    def literal_text(self, template: str) -> str:
        if template not in self._literals:
            self._literals[template] = self._call("literal_text", template)
        return self._literals[template]

    def variables(self, template: str) -> Mapping[str, Sequence[str]]:
        literals: dict[str, list[str]] = self._call("variables", template)
        return literals

    def _call(self, method: str, argument: object) -> Any:
        try:
            return self._helper.call_twice(method, argument, seconds=SECONDS)
        except JobFailed as error:
            raise TemplateError(error.message or error.type_name) from error
        except HelperKilled as error:
            blameless = error.without_blame("The chat template's process", was_tried_twice=True)
            raise blameless or TemplateError(f"rendering {error}") from error


@cache
def helper_renderer() -> HelperRenderer:
    """Return the process's only renderer: its child caches the compiled templates of all models."""
    return HelperRenderer()


def render_with(renderer: TextRenderer) -> None:
    """Make transformers render every chat template with this renderer."""
    base: Any = import_module("transformers.tokenization_utils_base")

    def rendered(
        conversations: list[Any], **arguments: Any
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        lock = _idle_lock.get()
        with nullcontext() if lock is None else _released(lock):
            texts = [
                renderer.render({**arguments, "conversations": [each]}) for each in conversations
            ]
        return [check_length(text) for text in texts], [[] for _ in texts]

    base.render_jinja_template = rendered
    base._get_template_literal_text = renderer.literal_text
