"""PromptSource: the ingredients of a conversation's prompt, the same for all dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve.api.bodies.fields import TemplateKwargs
from mlxserve.text.conversation import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """A conversation and the other ingredients of its prompt.

    read: builds the conversation from about `num_messages` of the body, with images or without
    continues: the answer continues the last message
    """

    read: Callable[[bool], Conversation]
    num_messages: int
    template_kwargs: TemplateKwargs = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continues: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        own = {"continue_final_message": True} if self.continues else {}
        return {**self.template_kwargs, **own}
