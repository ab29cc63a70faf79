"""Builds the TextModel of a model that embeds or ranks texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.embedding.encoder_engine import EncoderEngine
from mlxserve.chat.embedding.encoder_vectors import EncoderVectors
from mlxserve.chat.embedding.rankers import JudgeRanker, PairRanker, VectorRanker
from mlxserve.chat.ranker import Ranker
from mlxserve.chat.text_model import TextModel
from mlxserve.chat.view import View
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.facts import ModelFacts
from mlxserve.hub.text_encoders import TextEncoder
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlxserve.engine.async_engine import AsyncEngine


def embedding_model(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    rules: TextEncoder,
    *,
    view: View,
    vocab_size: int,
    facts: ModelFacts,
    executor: FairExecutor,
    owns_executor: bool,
) -> TextModel:
    """Build a model over an engine that runs an `Encoder`. Arguments are those of TextModel."""
    codec = TextCodec(engine, tokenizer, vocab_size)
    encoder = EncoderEngine(engine, codec)
    vectors = None if rules.is_reranker else EncoderVectors(encoder, codec, rules)
    ranker: Ranker
    if rules.judges:
        ranker = JudgeRanker(encoder, codec)
    elif vectors is None:
        ranker = PairRanker(encoder, codec)
    else:
        ranker = VectorRanker(encoder, codec, vectors, rules.prompts)
    return TextModel(
        engine=engine,
        codec=codec,
        view=view,
        executor=executor,
        owns_executor=owns_executor,
        vectors=vectors,
        ranker=ranker,
        facts=facts,
    )
