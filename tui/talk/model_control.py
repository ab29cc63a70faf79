"""ModelControl: which models mlxserve has loaded, and loading, unloading and pinning them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from tui.talk.errors import ModelBusy, NoEngine
from tui.talk.model_states import ModelMemory, ModelState
from tui.talk.wire import error_code, explained, json_object, own_content, said

_MODELS = "/api/v1/models"
_BUSY = "busy"  # the code of the refusal to unload a model that answers
_LOADING = httpx.Timeout(10.0, read=None)  # a large model takes minutes, behind others longer


class ModelControl:
    """Uses the connections of a `ChatClient`. Raises NoEngine if the server lacks the routes."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    async def models(self) -> ModelMemory:
        """List the models. Raises ChatError."""
        with explained(self._url):
            reply = await self._http.get(_MODELS)
        content = self._content(reply)
        limit = content.get("memory_limit")
        try:
            models = [ModelState.from_card(card) for card in content["data"]]
            return ModelMemory(models, None if limit is None else int(limit))
        except (KeyError, TypeError, ValueError) as error:
            raise self._no_control() from error

    async def load(self, name: str, *, is_pinned: bool | None = None) -> None:
        """Load a model, and pin or unpin it. Returns once it is loaded. Raises ChatError."""
        pinned = {} if is_pinned is None else {"pinned": is_pinned}
        await self._post("load", {"model": name, **pinned})

    async def unload(self, name: str, *, force: bool = False) -> None:
        """Unload a model; `force` ends its answers. Raises ModelBusy and other ChatErrors."""
        await self._post("unload", {"model": name, "force": force})

    async def _post(self, what: str, body: Mapping[str, Any]) -> None:
        with explained(self._url):
            reply = await self._http.post(f"{_MODELS}/{what}", json=body, timeout=_LOADING)
        self._content(reply)

    def _content(self, reply: httpx.Response) -> dict[str, Any]:
        content = json_object(reply.content)
        if error_code(content) == _BUSY:
            raise ModelBusy(f"{said(content)}.")
        return own_content(reply, self._url, lacks=self._no_control(), known="model_not_found")

    def _no_control(self) -> NoEngine:
        return NoEngine(
            f"The server at {self._url} does not say what it has loaded. `mlxserve serve` does, and the "
            "server that is started without --url."
        )
