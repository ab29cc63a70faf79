"""PromptSource: the ingredients of a conversation's prompt, which every dialect's body has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve.api.bodies.fields import TemplateKwargs
from mlxserve.api.bodies.thinking import ThinkingFields
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


class ConversationBody(ThinkingFields):
    """A body with a conversation, and perhaps tools, from which a prompt is rendered."""

    @property
    def num_messages(self) -> int:
        """About the number of messages of the conversation."""
        raise NotImplementedError

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in the format of chat templates. Raises ApiError 400."""
        raise NotImplementedError

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message."""
        return False

    def conversation(self, sees: bool = False) -> Conversation:
        """Read the conversation. `sees` and errors are those of `Conversation.from_messages`."""
        raise NotImplementedError

    def prompt_source(self) -> PromptSource:
        """The source from which the conversation becomes a prompt. Raises ApiError 400."""
        return PromptSource(
            read=self.conversation,
            num_messages=self.num_messages,
            template_kwargs=self.template_kwargs,
            tools=self.definitions,
            continues=self.continues,
        )
