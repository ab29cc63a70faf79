"""Builds the TextModel of a language model, which writes answers and makes vectors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.chat.codec import TextCodec
from mlxserve.chat.image_prompts import ImagePrompts
from mlxserve.chat.text_model import TextModel
from mlxserve.chat.vectors import LanguageVectors
from mlxserve.chat.view import View
from mlxserve.chat.writer import Writer
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.facts import ModelFacts
from mlxserve.text.guidance.planner import Planner
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # it imports mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine


def language_model(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    *,
    name: str,
    vocab_size: int,
    default_params: SamplingParams,
    salt: str = "",
    facts: ModelFacts | None = None,
    executor: FairExecutor | None = None,
    owns_executor: bool = True,
    adapters: Mapping[str, str] | None = None,
    prefix_file: Path | None = None,
    images: ImagePrompts | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tool_keep_seconds: float = 60.0,
    max_num_waiting: int | None = None,
) -> TextModel:
    """Build a model over its engine, and over the same engine with each of its adapters.

    name: in the API
    salt: names the model's weights, as models never share pages
    executor: runs all work on its prompts; None creates one
    adapters: digests of the engine's adapters by name, in the order of their numbers

    Other arguments are those of TextModel and Writer.
    """
    codec = TextCodec(engine, tokenizer, vocab_size)
    owns_executor = owns_executor or executor is None
    executor = executor or FairExecutor()
    write = partial(
        Writer,
        engine,
        codec,
        Planner(tokenizer, vocab_size, executor),
        default_params=default_params,
        request_numbers=itertools.count(),
        images=images,
        template_kwargs=template_kwargs,
        tool_keep_seconds=tool_keep_seconds,
        max_num_waiting=max_num_waiting,
    )
    of_view = partial(
        TextModel,
        engine=engine,
        codec=codec,
        executor=executor,
        owns_executor=owns_executor,
        default_params=default_params,
        facts=facts or ModelFacts(),
    )
    own = View(name, salt)
    adapted: dict[str, TextModel] = {}
    for number, (adapter, digest) in enumerate((adapters or {}).items()):
        view = own.with_adapter(number, adapter, digest)
        file = prefix_file and prefix_file.with_stem(f"{prefix_file.stem}-{digest}")
        adapted[adapter] = of_view(
            view=view,
            writer=write(view, prefix_file=file),
            vectors=LanguageVectors(engine, codec, view),
        )
    return of_view(
        view=own,
        writer=write(own, prefix_file=prefix_file),
        vectors=LanguageVectors(engine, codec, own),
        adapted=adapted,
    )
