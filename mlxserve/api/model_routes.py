"""ModelRoutes: the routes over one TextModel. They do not know that there may be several."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.routing import Router

from mlxserve.api.access.keys import Keyring
from mlxserve.api.anthropic.routes import Anthropic
from mlxserve.api.bodies.body_route import check_subject
from mlxserve.api.metrics import Metrics
from mlxserve.api.model_names import ModelNames
from mlxserve.api.native.cache import Cache
from mlxserve.api.native.infill import Infill
from mlxserve.api.native.model import ModelCard
from mlxserve.api.native.monitoring import Monitoring
from mlxserve.api.native.prefixes import Prefixes
from mlxserve.api.native.rerank import Rerank
from mlxserve.api.native.tokenization import Tokenization
from mlxserve.api.ollama.routes import Ollama
from mlxserve.api.openai.embeddings import Embeddings
from mlxserve.api.openai.routes import OpenAI
from mlxserve.api.prefix_names import PrefixNames
from mlxserve.api.responses.routes import Responses
from mlxserve.api.responses.store import ResponseStore
from mlxserve.api.server.drain import Drain
from mlxserve.api.service import Service
from mlxserve.images.sources import ImageSources

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """State that all models of a server share."""

    keyring: Keyring
    max_prefix_share: float
    drain: Drain
    responses: ResponseStore
    images: ImageSources


class ModelRoutes:
    """The routes of one loaded model, as an application without middleware: `router`."""

    def __init__(
        self,
        model: TextModel,
        names: ModelNames,
        shared: SharedState,
        metrics: Metrics | None = None,
    ) -> None:
        """metrics: those of the model's other routes over the same engine, if there are any."""
        self.text_model = model
        self.metrics = metrics or Metrics(model.model_name, model.engine.stats)
        self.prefix_names = PrefixNames(model, shared.keyring, shared.max_prefix_share)
        self._keyring = shared.keyring
        self.names = names
        service = Service(model, self.metrics, self.prefix_names, shared.images)
        self.prompts = service.prompts
        self.routes = [
            *OpenAI(service).routes(),
            *Responses(service, shared.responses).routes(),
            *Anthropic(service).routes(),
            *Ollama(service).routes(),
            *ModelCard(service).routes(),
            *Embeddings(service).routes(),
            *Rerank(service).routes(),
            *Infill(service).routes(),
            *Prefixes(service).routes(),
            *Tokenization(service).routes(),
            *Monitoring(model, shared.drain).routes(),
            *Cache(service).routes(),
        ]
        check_subject(self.routes, of_model=True)
        self.router = Router(self.routes, redirect_slashes=False)

    async def restore(self) -> None:
        """Restore the named prefixes of earlier runs, except those of unknown keys."""
        keyring = self._keyring
        if (writer := self.text_model.writer) is None:
            return
        try:
            await writer.prefixes.restore(lambda key_id: not key_id or keyring.has(key_id))
        except Exception:
            logger.exception("Named prefixes of before the start are not ready")
