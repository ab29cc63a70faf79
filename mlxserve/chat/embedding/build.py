"""Builds engines for encoders, which compute texts only; their cache stays unused."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from metal_kernels.reading import read
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.chat.embedding.encoder import Encoder, EncoderText, read_dense
from mlxserve.chat.embedding.encoding import BATCH_TOKENS
from mlxserve.chat.embedding.networks import read_network
from mlxserve.core.config import MIN_PAGES, EngineConfig
from mlxserve.core.errors import InvalidConfig, OutOfMemory, UnsupportedModel
from mlxserve.core.stats import PlannedMemory
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.hub.context import Context
from mlxserve.hub.files import ModelFiles, text_config
from mlxserve.hub.text_encoders import TextEncoder
from mlxserve.model.caches import MODEL_ERRORS, CacheTree
from mlxserve.model.load import LoadedModel, in_float32, refuse_too_large
from mlxserve.model.paged import RowSelector
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.system import metal_memory

log = logging.getLogger("mlxserve.chat.embedding")

_LENGTHS = (5, 12)  # tokens of the texts of the check
# Of the largest number, in float32 and in half precision: other shapes round otherwise.
_TOLERANCES = 1e-3, 3e-2
# Head dimensions whose attention MLX's kernels compute without keeping its scores.
_FUSED_HEADS = (64, 80, 128)


def refuse_options(config: EngineConfig, name: str) -> None:
    """Raises InvalidConfig for options that encoders do not support."""
    if config.num_ranks > 1:
        raise InvalidConfig(
            f"{name} turns texts into vectors, and such models are not divided among ranks. Serve it in one "
            "process."
        )
    if config.draft_model is not None:
        raise InvalidConfig(
            f"{name} turns texts into vectors, for which nothing is drafted. Leave draft_model out.",
            option="draft_model",
        )
    if config.kv_publisher is not None:
        raise InvalidConfig(
            f"{name} turns texts into vectors, and caches no pages to tell of. Leave kv_events out.",
            option="kv_events",
        )
    if config.adapter:
        raise InvalidConfig(
            f"{name} turns texts into vectors, and such models have no adapters. Leave adapter out.",
            option="adapter",
        )


def build_encoder_engine(
    config: EngineConfig,
    files: ModelFiles,
    rules: TextEncoder,
    answers: tuple[int, int] = (0, 0),
    *,
    is_metal: bool,
    memory_limit: int,
) -> tuple[Engine, int]:
    """Return (engine, vocabulary size). Call it on the thread that will run the engine.

    answers: as in Encoder

    Raises MlxServeError.
    """
    encoder = load_encoder(files, rules, answers, is_metal=is_metal, memory_limit=memory_limit)
    check(encoder, files.name)
    shape = _Shape.from_config(files.config, is_metal=is_metal)
    weights = sum(array.nbytes for _, array in tree_flatten(encoder.parameters()))
    max_length = _max_length(config, files.name, rules, shape, memory_limit - weights)
    num_pages = max(MIN_PAGES, -(-max_length // config.page_size))
    config = config.with_options(num_pages=num_pages, max_model_len=max_length)
    caches = CacheTree(nodes=(), layers=())
    context = Context(max_length, max_length)
    loaded = LoadedModel(
        files.name, encoder, files.config, caches, RowSelector(), shape.vocabulary, context
    )
    planned = PlannedMemory(weights=weights, step=shape.step_size(max_length))
    log.info(
        "%s is loaded: %s, texts of up to %d tokens",
        files.name,
        "scores queries and documents" if rules.is_reranker else "makes vectors",
        max_length,
    )
    if not (rules.says_pooling or rules.is_reranker):
        log.warning(
            "%s: its files do not say how to pool (1_Pooling/config.json); it pools by %s",
            files.name,
            rules.poolings[0],
        )
    kv = KVPool((), num_pages, config.page_size, ())
    if is_metal:
        metal_memory.METAL_MEMORY.add(weights, planned.step, config.wired_limit).follow(kv)
    engine = Engine(
        Scheduler(config.scheduler, PagePool(num_pages, config.page_size)),
        ModelRunner(loaded, kv),
        StepTimeModel(None),
        planned=planned,
    )
    return engine, shape.vocabulary


def load_encoder(
    files: ModelFiles,
    rules: TextEncoder,
    answers: tuple[int, int] = (0, 0),
    *,
    is_metal: bool,
    memory_limit: int,
) -> Encoder:
    """Load an encoder and its weights into memory. Raises UnsupportedModel, OutOfMemory."""
    refuse_too_large(files.weight_size, files.name, memory_limit)
    network = read_network(files, rules)
    if not is_metal:
        network = in_float32(network, files.name, memory_limit)
    padding = files.config.get("pad_token_id")
    encoder = Encoder(
        network,
        rules,
        _dense(files, rules, network),
        padding if isinstance(padding, int) and padding >= 0 else 0,
        answers,
    )
    encoder.eval()
    mx.eval(encoder.parameters())
    return encoder


def _dense(files: ModelFiles, rules: TextEncoder, network: nn.Module) -> list[nn.Module]:
    own: list[nn.Module] = list(getattr(network, "dense", ()))
    if rules.dense and not (own and len(own) == len(rules.dense)):
        return read_dense(files, rules.dense)
    return own


def check(encoder: Encoder, name: str) -> None:
    """Compute two texts alone and together.

    Raises UnsupportedModel if padding changes a text, or if the model cannot be computed.
    """
    draw = random.Random(0)
    texts = [EncoderText([draw.randrange(3, 100) for _ in range(length)]) for length in _LENGTHS]
    compute = encoder.scores if encoder.rules.is_reranker else encoder.vectors
    try:
        together = read(compute(texts))
        alone = np.concatenate([read(compute([text])) for text in texts])
    except MODEL_ERRORS as error:
        raise UnsupportedModel(f"{name}: its network cannot be computed: {error}") from error
    is_exact = all(array.dtype == mx.float32 for _, array in tree_flatten(encoder.parameters()))
    largest = max(float(np.abs(alone).max()), 1e-6) * _TOLERANCES[not is_exact]
    if not np.isfinite(alone).all() or not np.abs(together - alone).max() <= largest:
        raise UnsupportedModel(
            f"{name}: a text computed beside another one is not what it is alone, so it cannot be served in "
            "batches."
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes that determine the memory of a batch."""

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    keeps_scores: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, is_metal: bool) -> _Shape:
        """Read the sizes. Raises UnsupportedModel."""
        text = text_config(config)
        try:
            hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
            head_dim = int(text.get("head_dim") or hidden // heads)
            inner = int(text.get("intermediate_size") or 4 * hidden)
            vocabulary = int(text["vocab_size"])
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise UnsupportedModel(f"config.json lacks a size of the model: {error}") from error
        return cls(vocabulary, hidden, inner, heads, not (is_metal and head_dim in _FUSED_HEADS))

    def step_size(self, max_length: int) -> int:
        """Bytes of the largest batch.

        Counts activations of a few layers in float32, and the mask and the scores before and after
        the softmax of one layer.
        """
        num_tokens = max(BATCH_TOKENS, max_length)
        pairs = num_tokens * max_length
        scores = 2 * self.heads * pairs if self.keeps_scores else 0
        return 4 * (num_tokens * (8 * self.hidden + 3 * self.inner) + pairs + scores)


def _max_length(
    config: EngineConfig, name: str, rules: TextEncoder, shape: _Shape, memory: int
) -> int:
    """Maximum tokens of a text. Raises InvalidConfig, OutOfMemory."""
    configured = config.scheduler.max_model_len
    if configured is not None and configured > rules.max_length:
        raise InvalidConfig(
            f"max_model_len={configured}, but {name} was made for {rules.max_length} tokens; lower it.",
            option="max_model_len",
        )
    longest = configured or rules.max_length
    fitting = longest
    while shape.step_size(fitting) > memory and fitting > 16:
        fitting = fitting * 3 // 4
    if shape.step_size(fitting) > memory or (configured is not None and fitting < longest):
        raise OutOfMemory(
            f"{name}: a text of {longest} tokens needs {shape.step_size(longest) / (1 << 30):.1f} GiB beside "
            f"the weights, and there are {max(0, memory) / (1 << 30):.1f}. Lower max_model_len, or raise "
            "gpu_memory_utilization."
        )
    if fitting < longest:
        log.warning(
            "%s takes texts of %d tokens instead of %d: longer ones need more memory than there is",
            name,
            fitting,
            longest,
        )
    return fitting
