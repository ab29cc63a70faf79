"""The models for Ollama's clients: `/api/tags`, `/api/ps`, `/api/show`, `/api/pull` and `/`."""

from __future__ import annotations

import hashlib
import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.dispatch import ModelDispatch, OfferedModel
from mlxserve.api.errors import json_response
from mlxserve.api.models import capabilities, thinking_of
from mlxserve.api.ollama.reply import lines_or_object, timestamp
from mlxserve.api.ollama.schema import OllamaRequest
from mlxserve.core.version import __version__

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.hub.facts import ModelFacts

# Of the API that is spoken here: clients refuse servers that are older than what they need.
OLLAMA_VERSION = "0.24.0"
RUNNING = "Ollama is running"  # which some clients compare
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # as in Ollama, which adds 292 years to now


class OllamaModels:
    """The endpoints over all models."""

    def __init__(self, dispatch: ModelDispatch) -> None:
        self._dispatch = dispatch
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/api/show", self.show, body=OllamaRequest, of_model=False),
            BodyRoute("/api/pull", self.pull, body=OllamaRequest, of_model=False),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.ps, methods=["GET"]),
            Route("/api/version", self.version, methods=["GET"]),
            _ForPrograms("/", self.root, methods=["GET"], include_in_schema=False),
        ]

    async def show(self, request: Request, body: OllamaRequest) -> Response:
        """Describes a model, more of it if it is loaded."""
        offered = self._dispatch.model(body.named_model)
        details = self._details(offered)
        kind, model = details["family"] or "unknown", offered.text_model
        info: dict[str, Any] = {
            "general.architecture": kind,
            "general.basename": offered.model.name,
        }
        context = offered.model.context if model is None else model.max_model_len
        info |= {f"{kind}.context_length": context} if context else {}
        if (facts := _facts(offered)) is not None:
            info["general.parameter_count"] = facts.num_parameters
            info[f"{kind}.embedding_length"] = facts.hidden_size
        shown = {
            "modelfile": _modelfile(offered),
            "parameters": "" if model is None else _parameters(model),
            "template": "" if model is None else model.chat_template,
            "details": details,
            "model_info": info,
            "capabilities": _capabilities(offered),
            "modified_at": self._made(offered),
        }
        return json_response(
            {**shown, **({} if model is None else await thinking_of(request, model))}
        )

    async def pull(self, _request: Request, body: OllamaRequest) -> Response:
        """Succeeds for a model that is served. Nothing is downloaded."""
        self._dispatch.model(body.named_model)
        return lines_or_object(body, [{"status": "pulling manifest"}, {"status": "success"}])

    async def tags(self, request: Request) -> Response:
        """Lists the models that the key may ask for, each under all of its names."""
        models = self._models(request)
        return json_response(
            {"models": [each for offered in models for each in self._listed(offered)]}
        )

    async def ps(self, request: Request) -> Response:
        """Lists those of these models that are loaded, each under all of its names."""
        models = [
            {
                **each,
                "size": self._memory(offered),
                "size_vram": self._memory(offered),
                "expires_at": timestamp(self._expires_at(offered)),
                "context_length": offered.text_model.max_model_len,
            }
            for offered in self._models(request)
            if offered.text_model is not None
            for each in self._listed(offered)
        ]
        return json_response({"models": models})

    async def version(self, _request: Request) -> Response:
        """Tells the version of Ollama whose API this is."""
        return json_response({"version": OLLAMA_VERSION, "mlxserve": __version__})

    async def root(self, _request: Request) -> Response:
        """Tells programs that the server is running."""
        return PlainTextResponse(RUNNING, headers={"vary": "Accept"})

    def _models(self, request: Request) -> list[OfferedModel]:
        every = self._dispatch.models()
        return [offered for offered in every if self._dispatch.may_use(request, offered.name)]

    def _listed(self, offered: OfferedModel) -> list[dict[str, Any]]:
        """One card per name. Ollama's names always have a tag, and some clients look for it."""
        print_of = offered.name if offered.text_model is None else offered.text_model.view.salt
        card = {
            "modified_at": self._made(offered),
            "size": offered.size
            if offered.text_model is None or offered.adapter
            else offered.text_model.facts.weight_size,
            "digest": hashlib.sha256(print_of.encode()).hexdigest(),
            "details": self._details(offered),
            "capabilities": _capabilities(offered),
        }
        names = [
            name if ":" in name.rpartition("/")[2] else f"{name}:latest"
            for name in (offered.names.own, *offered.names.aliases)
        ]
        return [{"name": name, "model": name, **card} for name in names]

    def _memory(self, offered: OfferedModel) -> int:
        """Return the bytes of a loaded model, or those that an adapter takes beside it."""
        return offered.size if offered.adapter else self._dispatch.memory(offered.model.name)

    def _expires_at(self, offered: OfferedModel) -> datetime:
        seconds = self._dispatch.seconds_left(offered.model.name)
        return _NEVER if seconds is None else datetime.now(UTC) + timedelta(seconds=seconds)

    def _made(self, offered: OfferedModel) -> str:
        seconds = self._created if offered.text_model is None else offered.text_model.created
        return timestamp(datetime.fromtimestamp(seconds, UTC))

    def _details(self, offered: OfferedModel) -> dict[str, Any]:
        facts = _facts(offered)
        return {
            "parent_model": "" if offered.adapter is None else offered.model.name,
            "format": facts.format if facts else "",
            "family": facts.architecture if facts else "",
            "families": [facts.architecture] if facts else [],
            "parameter_size": facts.parameters_label if facts else "",
            "quantization_level": facts.quantisation if facts else "",
        }


def _facts(offered: OfferedModel) -> ModelFacts | None:
    return offered.model.facts if offered.text_model is None else offered.text_model.facts


def _modelfile(offered: OfferedModel) -> str:
    adapter = "" if offered.adapter is None else f"ADAPTER {offered.adapter.name}\n"
    return f"# Served by mlxserve\nFROM {offered.model.name}\n{adapter}"


def _capabilities(offered: OfferedModel) -> list[str]:
    """The model's capabilities, without "embedding" for a model that answers.

    Clients take a model that embeds for one that they cannot chat with.
    """
    if offered.text_model is None:
        return [offered.model.purpose]
    left_out = {"embedding"} if offered.text_model.writer is not None else {"rerank"}
    return [ability for ability in capabilities(offered.text_model) if ability not in left_out]


def _parameters(model: TextModel) -> str:
    """The defaults of requests, one per line."""
    params = model.default_params
    parameters = {
        "num_ctx": model.max_model_len,
        "num_predict": params.max_tokens or -1,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
    }
    return "\n".join(f"{name:30} {json.dumps(value)}" for name, value in parameters.items())


class _ForPrograms(Route):
    """A route that ignores browsers."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
        return (Match.NONE, {}) if b"text/html" in accepted else super().matches(scope)
