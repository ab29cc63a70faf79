"""Prompts as token ids: what the routes that take text have in common.

Rendering and encoding are plain CPU work on texts of any length, so they run beside the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from mlxserve.api.access.security import in_namespace, without_namespace
from mlxserve.api.bodies.fields import Prompt
from mlxserve.api.errors import ApiError
from mlxserve.errors import UnknownPrefix

if TYPE_CHECKING:
    from mlxserve.chat import Chat


class Prompts:
    """Makes prompts for one `Chat`. Methods raise InvalidRequest, UnknownPrefix and ApiError."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def of_texts(
        self, request: Request, texts: Sequence[Prompt], prefix_name: str | None = None
    ) -> list[list[int]]:
        """Each text or list of token ids, behind the named prefix."""
        prefix = self.prefix(request, prefix_name)
        return await asyncio.to_thread(lambda: [prefix + self._encoded(text) for text in texts])

    async def of_messages(
        self,
        request: Request,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, bool | str],
        prefix_name: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """A conversation in the model's template, behind the named prefix.

        continues: the answer goes on where the last message ends
        """
        prefix = self.prefix(request, prefix_name)
        if continues:
            add_generation_prompt = False
            template_kwargs = {**template_kwargs, "continue_final_message": True}
        rendered = await asyncio.to_thread(
            self._chat.render,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return prefix + rendered

    def prefix(self, request: Request, name: str | None) -> list[int]:
        """The token ids of a prefix; none without a name. An error tells the key's own names."""
        if name is None:
            return []
        try:
            return list(self._chat.prefix(in_namespace(request, name)))
        except UnknownPrefix as error:
            names = (without_namespace(request, known) for known in self._chat.prefixes())
            own = [known for known in names if known is not None]
            raise UnknownPrefix.named(name, own) from error

    def _encoded(self, prompt: Prompt) -> list[int]:
        token_ids = self._chat.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise ApiError(400, "prompt: is empty.", param="prompt", code="invalid_value")
        return token_ids
