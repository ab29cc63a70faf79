"""Prompts as token ids: what the routes that take text have in common.

Rendering and encoding are plain CPU work on texts of any length, so they run on a thread beside
the event loop, large texts on threads of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxserve.api.bodies.fields import Prompt
from mlxserve.api.errors import ApiError
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

    async def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, bool | str],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """A conversation in the model's template.

        continues: the answer continues the last message
        """
        if continues:
            add_generation_prompt = False
            template_kwargs = {**template_kwargs, "continue_final_message": True}
        render = partial(
            self._chat.render,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return await run_in_lane(text_size(messages, tools), render)

    def _encoded(self, prompt: Prompt, field: str) -> list[int]:
        token_ids = self._chat.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise ApiError(400, f"{field}: is empty.", param=field, code="invalid_value")
        return token_ids
