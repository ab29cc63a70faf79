"""ChatTemplate: what a model's chat template is, and what it accepts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from mlxserve.core.errors import EngineStopped, HelperUnavailable, InvalidRequest, in_one_line
from mlxserve.text.call_probes import CallTexts, call_texts
from mlxserve.text.controls import Attempt, Controls, has_controls
from mlxserve.text.conversation import Call, Conversation
from mlxserve.text.format_choice import FormatChoice, choose_format
from mlxserve.text.parsing.markup import Markup
from mlxserve.text.parsing.writing import write_calls
from mlxserve.text.probing import TEMPLATE_ERRORS, abilities_of, renderer_of, template_of
from mlxserve.text.template_caps import ALWAYS_ALLOWED, TemplateCaps
from mlxserve.text.template_compat import AdaptedConversation, Fitting, calls_as_json
from mlxserve.text.templates import TextRenderer

log = logging.getLogger("mlxserve.text")


class ChatTemplate:
    """The template of one tokenizer. Methods may be called from any thread."""

    def __init__(self, wrapper: Any, renderer: TextRenderer, markup: Callable[[], Markup]) -> None:
        """Wrap mlx-lm's template of a tokenizer.

        renderer: renders probes of the template
        markup: how the model writes calls, for a template that shows none
        """
        self._wrapper = wrapper
        self._renderer = renderer
        self._markup = markup
        self._looking = threading.Lock()
        self._fitting: Fitting | None = None
        self._told: set[str] = set()  # changes of conversations that were logged

    @property
    def exists(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def text(self) -> str:
        """Its text; empty for none, or one written in Python."""
        return template_of(self._wrapper, None) or "" if self.exists else ""

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template renders tool definitions."""
        return self.exists and self._mentions("tools")

    def _mentions(self, word: str) -> bool:
        """Whether the chat template contains `word`. True for a template written in Python."""
        template = self._wrapper.chat_template
        if isinstance(template, dict):
            return any(word in text for text in template.values())
        return word in template if isinstance(template, str) else self.exists

    @property
    def no_tools(self) -> list[dict[str, Any]] | None:
        """What the template takes for no tools: some loop over a list whether it is there or not."""
        return None if self.caps.without_tools else []

    @property
    def caps(self) -> TemplateCaps:
        """What the chat template takes."""
        return self.fitting().abilities

    def card(self) -> dict[str, Any]:
        """Return the capabilities as JSON, with the format of calls and whether it was read back."""
        row, reads_back = self.call_format
        name = None if row is None else row.name
        return {**self.caps.card(), "call_format": {"name": name, "reads_back": reads_back}}

    @cached_property
    def call_format(self) -> FormatChoice:
        """The format of the model's calls: the one that reads what the template writes."""
        choice = choose_format(self._wrapper, self._call_texts())
        if choice.reads_back is False:
            log.warning(
                "No known format of tool calls reads what the chat template writes for a call; "
                "calls are parsed as %s.",
                "text" if choice.row is None else choice.row.name,
            )
        return choice

    def _call_texts(self) -> CallTexts | None:
        """What the template writes for calls; None if it shows none, or cannot be rendered."""
        if not self.supports_tools:
            return None
        with suppress(HelperUnavailable, EngineStopped, TemplateError):
            return call_texts(renderer_of(self._wrapper, self._renderer), self.caps)
        return None

    def fitting(self) -> Fitting:
        """Fits conversations to the chat template, which is looked at when this is first called."""
        with self._looking:
            if self._fitting is None:
                self._fitting = Fitting(abilities_of(self._wrapper, self._renderer), self._written)
            return self._fitting

    def _written(self, calls: Sequence[Call]) -> str:
        """Calls as the model writes them, for a template that shows none."""
        row = self._markup().format
        if row is None:
            return calls_as_json(calls)
        return write_calls(row, [(call.name, call.as_object(), call.id) for call in calls])

    def fit(self, conversation: Conversation) -> AdaptedConversation:
        """The conversation as the chat template takes it. Says once what is changed for that."""
        fitted = self.fitting().fit(conversation)
        self.log_changes(fitted.changes)
        return fitted

    def log_changes(self, changes: Sequence[str]) -> None:
        """Log those that were not logged before."""
        if new := set(changes) - self._told:
            self._told |= new
            log.warning("Conversations are fitted to the chat template: %s", "; ".join(sorted(new)))

    def usable(self, variables: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
        """The variables without those that the template does not read, and a sentence about these."""
        names = variables.keys() - ALWAYS_ALLOWED - {"continue_final_message"}
        # What a template reads is not looked up for the usual names.
        unread = names - self.caps.variables if names else names
        if not unread:
            return dict(variables), ()
        usable = {name: value for name, value in variables.items() if name not in unread}
        return usable, (f"the chat template does not read {', '.join(sorted(unread))[:200]}",)

    def first_accepted(
        self, variables: Mapping[str, Any], rendered: Callable[[Attempt], list[int]]
    ) -> tuple[list[int], Sequence[str]]:
        """Token ids of the first attempt that the template accepts, and its changes. Raises InvalidRequest."""
        refusal: Exception | None = None
        for attempt in self._attempts(variables) if variables else (Attempt({}),):
            try:
                return rendered(attempt), attempt.changes
            except TEMPLATE_ERRORS as error:
                refusal = error
        assert refusal is not None
        raise InvalidRequest(
            f"The model's chat template rejects these messages: {in_one_line(refusal)}"
        ) from refusal

    def _attempts(self, variables: Mapping[str, Any]) -> Iterator[Attempt]:
        """What the template accepts is not looked up for variables that control no thinking."""
        controls = self.caps.controls if has_controls(variables) else Controls()
        return controls.attempts(variables)

    def prepare(self) -> None:
        """Look at the template beside what follows; its helper process takes a third of a second."""
        threading.Thread(target=self._look, name="mlxserve-templates", daemon=True).start()

    def _look(self) -> None:
        with suppress(HelperUnavailable, EngineStopped):  # the first one who needs it looks again
            self.fitting()
