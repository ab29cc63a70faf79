"""TextModel: a loaded model and its parts, one for each thing that it can do.

    writer    answers: render, submit, named prefixes     language models
    vectors   texts as vectors                            language models, embedding models
    ranker    relevance of documents                      embedding models, rerankers

answer = await model.require_writer().submit(prompt, params)
async for delta in answer: ...
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.ranker import Ranker
from mlxserve.chat.vectors import Vectors
from mlxserve.chat.view import View
from mlxserve.chat.writer import Writer
from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.facts import ModelFacts
from mlxserve.request import Forgotten
from mlxserve.text.template_caps import TemplateCaps

if TYPE_CHECKING:  # it imports mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextModel:
    """A loaded model. Parts that it does not support are None. Usable from any event loop.

    codec: text to token ids and back
    view: the model's own weights, or those with an adapter
    executor: runs all work on its prompts
    owns_executor: `close` ends the executor
    default_params: the sampling that the model's authors recommend
    facts: description of the model for clients
    adapted: the same engine with each adapter, by the adapter's name
    created: seconds since 1970
    """

    engine: AsyncEngine
    codec: TextCodec
    view: View
    executor: FairExecutor
    owns_executor: bool = True
    writer: Writer | None = None
    vectors: Vectors | None = None
    ranker: Ranker | None = None
    default_params: SamplingParams = field(default_factory=SamplingParams)
    facts: ModelFacts = field(default_factory=ModelFacts)
    adapted: Mapping[str, TextModel] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.view.name

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return self.engine.max_model_len

    @property
    def can_call(self) -> bool:
        """True if the template shows tools, and the model's tool calls can be parsed."""
        tokenizer = self.codec.tokenizer
        return tokenizer.markup.can_call and tokenizer.template.supports_tools

    @property
    def can_think(self) -> bool:
        """True if the model was trained to reason before it answers."""
        return self.codec.tokenizer.markup.is_taught

    @property
    def supports_images(self) -> bool:
        """True if messages may hold images."""
        return self.writer is not None and self.writer.supports_images

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template; empty if it has none, or one written in Python."""
        return self.codec.tokenizer.template.text

    def template_caps(self) -> TemplateCaps | None:
        """The capabilities of the model's chat template; None without one. Waits until they are known."""
        template = self.codec.tokenizer.template
        return template.caps if template.exists else None

    def template_card(self) -> dict[str, Any] | None:
        """Describe the model's chat template for clients; None without one. Waits until it is known."""
        template = self.codec.tokenizer.template
        return template.card() if template.exists else None

    # ---- parts

    def require_writer(self) -> Writer:
        """Return the writer. Raises InvalidRequest for a model that writes no answers."""
        if self.writer is None:
            does = "ranks documents" if self.vectors is None else "embeds and ranks texts"
            raise InvalidRequest(
                f"{self.model_name} {does} and writes no answers. Name a language model for this "
                "request."
            )
        return self.writer

    def require_vectors(self) -> Vectors:
        """Return the vectors. Raises InvalidRequest for a model that makes none."""
        if self.vectors is None:
            raise InvalidRequest(
                f"{self.model_name} is a reranker, which ranks documents (/v1/rerank) and makes no "
                "vectors. Name an embedding model."
            )
        return self.vectors

    def require_ranker(self) -> Ranker:
        """Return the ranker. Raises InvalidRequest for a model that ranks no documents."""
        if self.ranker is None:
            raise InvalidRequest(
                f"{self.model_name} ranks no documents: /v1/rerank takes a reranker or an embedding "
                "model."
            )
        return self.ranker

    # ---- adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self.adapted)

    def with_adapter(self, name: str | None) -> TextModel:
        """Return the model with an adapter; itself for None. It is closed with this one.

        Raises InvalidParameter for an unknown name.
        """
        if name is None:
            return self
        if name not in self.adapted:
            known = ", ".join(self.adapted) or "none"
            raise InvalidParameter("adapter", f"{name!r:.80} is not loaded. Loaded: {known}")
        return self.adapted[name]

    async def forget(
        self,
        prompts: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]] = (),
        cache_salt: str | None = None,
    ) -> Forgotten:
        """Forget the cached pages of deleted conversations, in memory and on disk, for all adapters.

        Pages stay if a prompt in `kept`, a named prefix or a running request uses them as well.
        Raises EngineStopped.
        """
        total = Forgotten()
        for model in (self, *self.adapted.values()):
            if model.writer is not None:
                total += await model.writer.forget(prompts, kept, cache_salt)
        return total

    def close(self) -> None:
        """Abort every answer and end the engine. Idempotent."""
        # First: its thread uses the matchers of the writer's planner.
        self.engine.close()
        if self.owns_executor:
            self.executor.close()
        if self.writer is not None:
            self.writer.close()
        self.codec.tokenizer.close()
