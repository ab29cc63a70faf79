"""`/api/v1/prompts`: system prompts and sampling that were saved under a name, for each API key its own.

GET     /api/v1/prompts         all of them
POST    /api/v1/prompts         {"name": NAME, "system": TEXT, "sampling": {"temperature": 0.2}}: save one
DELETE  /api/v1/prompts/{id}

They belong to whom the chats belong (`chats`), and lie in the same file.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.generation import Seed
from mlxserve.api.bodies.json_body import body_size
from mlxserve.api.bodies.request_body import RequestBody, StrictModel
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.native.chats import MAX_PAGE, check_owner, run_on_chats
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.saved_prompts import MAX_NAME, MAX_SYSTEM, PromptRefused, SavedPrompt
from mlxserve.history.store import Store

_MOST = 2**31 - 1
_ID_DIGITS = 18


def _one_line(name: str) -> str:
    name = " ".join(name.split())
    if not name:
        raise ValueError("must have a letter or another sign")
    return name


class SavedSampling(StrictModel):
    """The values of sampling that a prompt sets; all others are the model's defaults."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=_MOST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    seed: Seed | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    def values(self) -> dict[str, float | int | str]:
        """The values that are set."""
        every = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in every if value is not None}


class SavedPromptRequest(RequestBody):
    """The body of `POST /api/v1/prompts`. One of the same name is replaced."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_one_line)]
    system: Annotated[str, Field(max_length=MAX_SYSTEM)] = ""
    sampling: SavedSampling = Field(default_factory=SavedSampling)


class SavedPromptRoutes:
    """The endpoints over the saved prompts of all keys."""

    def __init__(self, stores: ChatStores) -> None:
        self._stores = stores

    def routes(self) -> list[Route]:
        own_route = partial(BodyRoute, of_model=False, admit=check_owner)
        return [
            Route("/api/v1/prompts", self.index, methods=["GET"]),
            own_route("/api/v1/prompts", self.save, body=SavedPromptRequest),
            Route("/api/v1/prompts/{id}", self.delete, methods=["DELETE"]),
        ]

    async def index(self, request: Request) -> Response:
        """Lists the saved prompts by their names, with their texts."""

        def read(store: Store) -> list[dict[str, Any]]:
            return [_card(prompt) for prompt in store.prompts.all()]

        cards = await run_on_chats(self._stores, request, read, nbytes=MAX_PAGE)
        return json_response({"object": "list", "data": cards})

    async def save(self, request: Request, body: SavedPromptRequest) -> Response:
        """Saves a system prompt and sampling under a name."""

        def save(store: Store) -> SavedPrompt:
            return store.prompts.save(body.name, body.system, body.sampling.values())

        try:
            prompt = await run_on_chats(self._stores, request, save, written=body_size(request))
        except PromptRefused as error:
            raise ApiError(409, str(error), code="too_many_prompts") from error
        return json_response(_card(prompt))

    async def delete(self, request: Request) -> Response:
        """Deletes a saved prompt; chats that began with it keep its text."""
        number = request.path_params["id"]
        is_number = number.isascii() and number.isdigit() and len(number) <= _ID_DIGITS

        def delete(store: Store) -> bool:
            return is_number and store.prompts.delete(int(number))

        if not await run_on_chats(self._stores, request, delete):
            raise ApiError(
                404,
                "There is no such saved prompt; it may have been deleted.",
                code="unknown_prompt",
            )
        return json_response({"id": int(number), "object": "prompt", "deleted": True})


def _card(prompt: SavedPrompt) -> dict[str, Any]:
    return {**asdict(prompt), "object": "prompt"}
