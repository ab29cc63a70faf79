"""Loads what drafts for a model: the model or head that `draft_model` names, or the head in the model's own checkpoint.

draft_model   a folder of a head for this model     MtpHead
              one of Gemma 4's assistants           Assistant
              any other model                       DraftModel
none          the model's files have a head         MtpHead
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxserve.cache.kv import Backends, KVPool
from mlxserve.cache.window_kv import WindowKV
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.hub.assistants import is_assistant
from mlxserve.hub.files import ModelFiles
from mlxserve.model.attention import choose_attention
from mlxserve.model.caches import MODEL_ERRORS
from mlxserve.model.drafting.draft_model import DraftModel
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.drafting import Drafting
from mlxserve.model.drafting.head import MtpHead
from mlxserve.model.drafting.head_model import show_hidden
from mlxserve.model.drafting.head_probe import (
    MIN_SHARE,
    NUM_GUESSES,
    ReadText,
    read_text,
    share_accepted,
)
from mlxserve.model.drafting.head_weights import HeadFiles, HeadRefused, load_head
from mlxserve.model.drafting.load_assistant import load_assistant
from mlxserve.model.load import LoadedModel, load, prepare, refuse_too_large
from mlxserve.model.load_check import try_first
from mlxserve.model.split_by_layers import missing_embedding_size, restore_embedding
from mlxserve.model.step_peak import measure_step

log = logging.getLogger("mlxserve.model.drafting")


@dataclass(frozen=True, slots=True)
class PagedDrafting:
    """A draft model or a head with the attention chosen for it: `source(loaded, pages, ...)` makes the drafter."""

    source: type[DraftModel] | type[MtpHead]
    loaded: LoadedModel
    backends: Backends
    files: ModelFiles

    def step_size(self, config: EngineConfig, *, is_metal: bool, memory_limit: int) -> int:
        """Measure a step, as it computes the prompts of each, too."""
        step = measure_step(
            config, self.loaded, self.backends, is_metal=is_metal, memory_limit=memory_limit
        )
        return step.planned

    def drafter(
        self,
        config: EngineConfig,
        target: LoadedModel,
        kv: KVPool,
        windows: WindowKV | None,  # noqa: ARG002 (all of its layers keep all positions)
        first_pages: int | None,
    ) -> DraftModel | MtpHead:
        """Make a drafter with as many pages as the model has."""
        layers = self.loaded.layers
        own = KVPool(layers, kv.num_pages, config.page_size, self.backends, first_pages)
        return self.source(
            self.loaded,
            DraftPages(own),
            vocab_size=target.vocab_size,
            max_rows=config.scheduler.step_budget,
            seed=config.seed,
        )


def reads_text(source: HeadFiles | ModelFiles | None) -> bool:
    """Return True if `load_drafting` tries this at a text, which all ranks compute."""
    return isinstance(source, HeadFiles) or (source is not None and is_assistant(source.config))


def load_drafting(
    config: EngineConfig,
    source: HeadFiles | ModelFiles,
    target: LoadedModel,
    text: Callable[[], Sequence[int]],
    *,
    is_metal: bool,
    memory_limit: int,
) -> Drafting:
    """Load what drafts for a model: a head, or what `draft_model` names.

    source: the head that `find_head` has found, otherwise the named files
    text: returns the token ids of a fixed text, at which a head or an assistant guesses first (`reads_text`)
    memory_limit: bytes for both
    Raises InvalidConfig for what does not draft, HeadRefused for a head, and what `load_probed` raises.
    """
    left = memory_limit - target.weight_size
    if isinstance(source, HeadFiles):
        return _load_head(config, source, target, text(), is_metal=is_metal, memory_limit=left)
    if is_assistant(source.config):
        return load_assistant(source, target, text, is_metal=is_metal, memory_limit=memory_limit)
    try_first(config, source, memory_limit)
    return _load_model(config, source, target, is_metal=is_metal, memory_limit=left)


def _load_model(
    config: EngineConfig,
    files: ModelFiles,
    target: LoadedModel,
    *,
    is_metal: bool,
    memory_limit: int,
) -> Drafting:
    loaded = load(files, is_metal=is_metal, memory_limit=memory_limit)
    if loaded.has_states:
        raise InvalidConfig(
            f"draft_model={files.name} keeps a recurrent state, which does not return to the last accepted "
            "token. Choose a draft model whose layers are all attention.",
            option="draft_model",
        )
    return _chosen(DraftModel, config, loaded, target, files)


def _load_head(
    config: EngineConfig,
    head: HeadFiles,
    target: LoadedModel,
    text: Sequence[int],
    *,
    is_metal: bool,
    memory_limit: int,
) -> Drafting:
    """Load a head; one whose guesses are wrong is tried with its norms stored the other way."""
    is_minus_one: bool | None = None
    share = 0.0
    show_hidden(target, head.family)
    known = _read_text(head, target, text)
    memory_limit -= _restore_embedding(head, target, memory_limit)
    for _ in range(2 if head.family.is_minus_one else 1):
        model, is_minus_one = load_head(
            head,
            target,
            is_metal=is_metal,
            memory_limit=memory_limit,
            is_minus_one=None if is_minus_one is None else not is_minus_one,
        )
        try:
            share = max(share, accepted := share_accepted(model, known))
        except MODEL_ERRORS as error:
            raise _not_computed(head, error) from error
        if accepted >= MIN_SHARE:
            loaded = prepare(model, target.config, head.name)
            log.info("%s: its head guesses %.0f %% of a text's tokens", head.name, 100 * accepted)
            return _chosen(MtpHead, config, loaded, target, head.files)
    raise HeadRefused(
        f"{head.name}: its head does not draft, because {100 * share:.0f} % of its guesses at {NUM_GUESSES} tokens of "
        f"a text are right and {100 * MIN_SHARE:.0f} % are required. It may be another model's."
    )


def _restore_embedding(head: HeadFiles, target: LoadedModel, memory_limit: int) -> int:
    """Give rank 0 of a pipeline the embedding, with which a head computes; return its bytes. Raises OutOfMemory."""
    size = missing_embedding_size(target.model)
    refuse_too_large(size, f"{head.name} with the model's embedding", memory_limit)
    restore_embedding(target.model)
    mx.eval(target.model.parameters())
    return size


def _read_text(head: HeadFiles, target: LoadedModel, text: Sequence[int]) -> ReadText:
    try:
        return read_text(target, text, takes_normed=head.family.takes_normed)
    except MODEL_ERRORS as error:
        raise _not_computed(head, error) from error


def _not_computed(head: HeadFiles, error: BaseException) -> HeadRefused:
    log.info("%s: the head fails on a text", head.name, exc_info=error)
    return HeadRefused(f"{head.name}: its head cannot be computed. The log says why.")


def _chosen(
    source: type[DraftModel] | type[MtpHead],
    config: EngineConfig,
    loaded: LoadedModel,
    target: LoadedModel,
    files: ModelFiles,
) -> Drafting:
    if config.kv_cache_dtype == "q8" and not any(spec.is_latent for spec in loaded.layers):
        loaded = loaded.in_8_bits()
    choice = choose_attention(config.attention_backend, loaded)
    if choice.loaded.by_sequence:
        raise InvalidConfig(
            f"draft_model={files.name} is served one sequence at a time, because its attention needs whole "
            "sequences, and would draft slowly. Choose another draft model.",
            option="draft_model",
        )
    loaded = replace(choice.loaded, name=files.name)
    log.info(
        "%s drafts for %s: %.2f GiB of weights, %.1f KiB a token",
        files.name,
        target.name,
        loaded.weight_size / (1 << 30),
        sum(spec.bytes_per_token() for spec in loaded.layers) / (1 << 10),
    )
    return PagedDrafting(source, loaded, choice.backends, files)
