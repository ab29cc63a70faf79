"""PromptClient: the prompts that mlxserve keeps under names, which its page shows as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from mlxserve.history.saved_prompts import SamplingValues, SavedPrompt
from tui.talk.errors import NoEngine
from tui.talk.wire import explained, own_content

_PROMPTS = "/api/v1/prompts"


class PromptClient:
    """Uses the connections of a `ChatClient`. Raises NoEngine if the server keeps no prompts."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    async def all(self) -> list[SavedPrompt]:
        """List the prompts by their names. Raises ChatError."""
        with explained(self._url):
            reply = await self._http.get(_PROMPTS)
        content = self._content(reply)
        try:
            return [_prompt(card) for card in content["data"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._no_prompts() from error

    async def save(self, name: str, system: str, sampling: SamplingValues) -> None:
        """Save a prompt, in the place of one with this name. Raises ChatError."""
        body = {"name": name, "system": system, "sampling": dict(sampling)}
        with explained(self._url):
            reply = await self._http.post(_PROMPTS, json=body)
        self._content(reply)

    async def delete(self, prompt: SavedPrompt) -> None:
        """Delete a prompt. Raises ChatError."""
        with explained(self._url):
            reply = await self._http.delete(f"{_PROMPTS}/{prompt.id}")
        self._content(reply)

    def _content(self, reply: httpx.Response) -> dict[str, Any]:
        return own_content(reply, self._url, lacks=self._no_prompts(), known="unknown_prompt")

    def _no_prompts(self) -> NoEngine:
        return NoEngine(
            f"The server at {self._url} keeps no prompts; mlxserve does. `/set preset NAME` takes one of "
            "presets.toml with any server."
        )


def _prompt(card: Mapping[str, Any]) -> SavedPrompt:
    """Raises KeyError, TypeError and ValueError."""
    return SavedPrompt(
        id=int(card["id"]),
        name=str(card["name"]),
        system=str(card["system"]),
        sampling=dict(card["sampling"]),
    )
