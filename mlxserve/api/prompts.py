"""Prompts as token ids: what the routes that take text have in common.

Rendering and encoding are plain CPU work on texts of any length, so they run on a thread beside
the event loop, large texts on threads of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from mlxserve.api.bodies.fields import Prompt, TemplateKwargs
from mlxserve.api.errors import invalid_value
from mlxserve.api.warnings import FITTED, warn
from mlxserve.text.conversation import Conversation
from mlxserve.text.fitting import Fitted
from mlxserve.text.lanes import run_in_lane, text_size

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat


class Prompts:
    """Makes prompts for one `Chat`. Methods raise InvalidRequest and ApiError."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def of_texts(self, texts: Sequence[Prompt], field: str = "prompt") -> list[list[int]]:
        """Texts, or lists of token ids, which stay as they are. `field`: for errors."""
        size = sum(len(text) for text in texts if isinstance(text, str))
        return await run_in_lane(size, lambda: [self._encoded(text, field) for text in texts])

    async def of_conversation(
        self,
        request: Request,
        conversation: Conversation,
        template_kwargs: TemplateKwargs,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """A conversation in the model's template. The reply warns of what was changed for that.

        continues: the answer continues the last message
        """
        variables: dict[str, Any] = {**template_kwargs}
        if continues:
            add_generation_prompt = False
            variables["continue_final_message"] = True

        def render() -> tuple[list[int], Fitted]:
            fitted = self._chat.fit(conversation)
            ids = self._chat.render(
                fitted.messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            return ids, fitted

        size = text_size([message.text for message in conversation.messages], tools)
        token_ids, fitted = await run_in_lane(size, render)
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
