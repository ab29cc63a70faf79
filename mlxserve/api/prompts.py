"""Prompts as token ids: what the routes that take text have in common.

Rendering and encoding are plain CPU work on texts of any length, so they are done in the client's
turn, beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from mlxserve.api.bodies.fields import Prompt, TemplateKwargs
from mlxserve.api.errors import invalid_value
from mlxserve.api.turns import in_turn
from mlxserve.api.warnings import FITTED, warn
from mlxserve.text.conversation import Conversation
from mlxserve.text.costs import MESSAGES_PER_SECOND, encode_seconds, render_seconds
from mlxserve.text.fitting import Fitted

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat

# Messages that are read in the event loop: leaving it takes as long.
_READ_HERE = 20


class Prompts:
    """Makes prompts for one `Chat`. Methods raise InvalidRequest and ApiError."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def of_texts(
        self, request: Request, texts: Sequence[Prompt], field: str = "prompt"
    ) -> list[list[int]]:
        """Texts, or lists of token ids, which stay as they are. `field`: for errors."""
        seconds = encode_seconds(sum(len(text) for text in texts if isinstance(text, str)))
        return await in_turn(
            request, seconds, lambda: [self._encoded(text, field) for text in texts]
        )

    async def of_conversation(
        self,
        request: Request,
        read: Callable[[], Conversation],
        num_messages: int,
        template_kwargs: TemplateKwargs,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """A conversation in the model's template. The reply warns of what was changed for that.

        read: makes the conversation from about `num_messages` of the body
        continues: the answer continues the last message
        """
        variables: dict[str, Any] = {**template_kwargs}
        if continues:
            add_generation_prompt = False
            variables["continue_final_message"] = True

        if num_messages <= _READ_HERE:
            conversation = read()
        else:
            conversation = await in_turn(request, num_messages / MESSAGES_PER_SECOND, read)

        def render() -> tuple[list[int], Fitted]:
            fitted = self._chat.fit(conversation)
            ids = self._chat.render(
                fitted.messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            return ids, fitted

        seconds = render_seconds([message.text for message in conversation.messages], tools)
        token_ids, fitted = await in_turn(request, seconds, render)
        if left_out := conversation.left_out:
            warn(request, f"left out: {', '.join(left_out)}")
        if fitted.changes:
            warn(request, f"{FITTED}: {', '.join(fitted.changes)}")
        return token_ids

    def _encoded(self, prompt: Prompt, field: str) -> list[int]:
        token_ids = self._chat.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise invalid_value(field, "is empty")
        return token_ids
