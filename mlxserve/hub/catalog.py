"""Catalog: included, local and well-known models, and whether each fits in memory.

Reads only config files and file sizes. Never imports mlx and never uses the network.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from mlxserve.cache.groups import Window
from mlxserve.cache.pool_memory import max_page_counts
from mlxserve.core.config import EngineConfig, SchedulerConfig, data_home
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.assistants import is_assistant
from mlxserve.hub.class_defaults import with_class_defaults
from mlxserve.hub.context import context_of
from mlxserve.hub.embedded import MODEL_NAME, model_path
from mlxserve.hub.files import ModelFiles, text_config
from mlxserve.hub.gguf.config import model_config
from mlxserve.hub.gguf.reader import read_header
from mlxserve.hub.gguf.sizes import size_in_memory
from mlxserve.hub.gguf_places import (
    files_in,
    hub_models,
    lm_studio_models,
    ollama_models,
    package_model,
)
from mlxserve.hub.head_families import family_of, has_head
from mlxserve.hub.headers import read_shapes
from mlxserve.hub.hub_cache import hub_cache, repositories, snapshots
from mlxserve.hub.known_models import SMOLLM2, KnownModel, known_models
from mlxserve.hub.kv_shapes import KVShape, copied_of, head_sizes, kv_shape
from mlxserve.hub.model_config import check_model_config
from mlxserve.hub.step_estimate import StepSizes, step_on_a_cpu, step_on_metal
from mlxserve.hub.text_encoders import TextEncoder, text_encoder
from mlxserve.system.device_memory import MemoryLimit, beside_cache
from mlxserve.system.files import MAX_TEXT, read_json


class Origin(StrEnum):
    BUNDLED = "included"
    DOWNLOADED = "downloaded"  # in huggingface_hub's cache
    FOLDER = "folder"
    OLLAMA = "Ollama"
    LM_STUDIO = "LM Studio"
    PACKAGE = "package"  # a Python package that ships a model
    SUGGESTED = "suggested"  # well-known, not on this machine


class WeightFormat(StrEnum):
    MLX = "mlx"  # safetensors, in any dtype or quantisation that mlx-lm reads
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that --model accepts."""

    name: str
    source: Origin
    weight_size: int  # bytes in memory
    kv: KVShape
    context: int  # tokens it was trained for; 0 if its config does not say
    num_heads: int = 0  # query heads per layer
    width: int = 0  # hidden size
    inner: int = 0  # intermediate size; for experts, the sum over those active for a token
    vocabulary: int = field(default=0, kw_only=True)  # tokens; 0 if its config does not say
    copied: int = field(default=0, kw_only=True)  # as in `StepSizes`
    format: WeightFormat = field(default=WeightFormat.MLX, kw_only=True)
    # "embedding", "rerank" or "draft" of what does not write by itself.
    purpose: str = field(default="", kw_only=True)
    has_vision: bool = field(default=False, kw_only=True)  # was trained to see images
    has_head: bool = field(default=False, kw_only=True)  # has a head that drafts for it

    def kv_size(self, bytes_per_value: int, *, in_8_bits: bool = False) -> int:
        """Bytes of keys and values per token, in the layers that keep every token.

        in_8_bits: with a float32 scale for each row; not for latents, which a server refuses to
            quantise
        """
        num_values = self.kv.num_values - self.kv.num_window_values
        num_rows = self.kv.num_rows - self.kv.num_window_rows
        return _kv_bytes(num_values, num_rows, bytes_per_value, in_8_bits)

    def window_size(self, bytes_per_value: int, *, in_8_bits: bool = False) -> int:
        """Bytes of the sliding-window layers' cache for any sequence; 0 without such layers.

        in_8_bits: as in `kv_size`
        """
        if not self.kv.window:
            return 0
        num_tokens = Window(self.kv.window, _PAGE_SIZE).num_held * _PAGE_SIZE
        values, rows = self.kv.num_window_values, self.kv.num_window_rows
        return num_tokens * _kv_bytes(values, rows, bytes_per_value, in_8_bits)

    def draft_size(self, bytes_per_value: int, *, in_8_bits: bool = False) -> int:
        """Bytes of keys and values per token of a draft model, whose layers all keep every token.

        in_8_bits: as in `kv_size`
        """
        return _kv_bytes(self.kv.num_values, self.kv.num_rows, bytes_per_value, in_8_bits)

    def step_size(
        self, memory: MemoryLimit, options: SchedulerConfig, *, is_metal: bool, in_8_bits: bool
    ) -> int:
        """Estimated bytes of a step, in addition to weights and cache.

        in_8_bits: as in `kv_size`
        """
        sizes = StepSizes(self.width, self.inner, self.num_heads, self.vocabulary, self.copied)
        num_rows = options.step_rows(is_metal=is_metal)
        if not is_metal:
            return step_on_a_cpu(sizes, num_rows=num_rows)
        longest = options.max_model_len or self.context or _USUAL_CONTEXT
        if per_token := self.kv_size(2, in_8_bits=in_8_bits):
            longest = min(longest, max(1, (memory.nbytes - self.weight_size) // per_token))
        return step_on_metal(
            sizes,
            num_rows=num_rows,
            num_seqs=options.max_num_seqs,
            longest=longest,
            total=memory.total,
        )


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The outcome of fitting a model into memory with the requested context."""

    fits: bool
    num_tokens: int  # tokens of cache that fit next to the weights and a step
    needed: int  # bytes of weights, a step's peak and the requested context
    context: int  # tokens of that context
    # Maximum number of windows, in the same memory; None without sliding-window layers.
    num_windows: int | None = None


_UNFIT = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
_PAGE_SIZE = EngineConfig().page_size
# Tokens, for a model whose config does not say what it was trained for.
_USUAL_CONTEXT = 8192


def memory_fit(
    entry: Entry,
    *,
    memory: MemoryLimit,
    is_metal: bool,
    options: SchedulerConfig | None = None,
    in_8_bits: bool = False,
    drafter: Entry | None = None,
) -> MemoryFit:
    """Check that the context of the options fits next to the weights and a step.

    options: with the longest context, which is capped at the length that the model was trained for.
        Without one it is that length
    in_8_bits: with keys and values in 8 bits (`kv_cache_dtype=q8`)
    drafter: the draft model that is loaded beside it
    """
    options = options or SchedulerConfig()
    # Without Metal all computation is in float32.
    bytes_per_value = 2 if is_metal else 4
    made_for = entry.context or options.max_model_len or _USUAL_CONTEXT
    context = min(options.max_model_len or made_for, made_for)
    per_token = entry.kv_size(bytes_per_value, in_8_bits=in_8_bits)
    step = entry.step_size(memory, options, is_metal=is_metal, in_8_bits=in_8_bits)
    taken = entry.weight_size
    if drafter is not None:
        per_token += drafter.draft_size(bytes_per_value, in_8_bits=in_8_bits)
        step += drafter.step_size(memory, options, is_metal=is_metal, in_8_bits=in_8_bits)
        taken += drafter.weight_size
    taken += beside_cache(step, memory.unkept)
    if entry.kv.window:
        window = Window(entry.kv.window, _PAGE_SIZE)
        return _fit_with_windows(
            window,
            per_token * _PAGE_SIZE,
            entry.window_size(bytes_per_value, in_8_bits=in_8_bits) // window.num_held,
            memory=memory.nbytes,
            taken=taken,
            longest=context,
            num_seqs=options.max_num_seqs,
            step_tokens=options.step_rows(is_metal=is_metal),
        )
    # A sequence of any length keeps as much.
    if per_token == 0:
        fits = taken <= memory.nbytes
        return MemoryFit(fits, context if fits else 0, taken, context)
    # A request's recurrent states take less than a tenth of the cache, and share it with pages (model/sizing.py).
    of_cache = Fraction(9, 10) if entry.kv.has_states else Fraction(1)
    num_tokens = max(0, int((memory.nbytes - taken) * of_cache) // per_token)
    needed = taken + math.ceil(context * per_token / of_cache)
    return MemoryFit(needed <= memory.nbytes, num_tokens, needed, context)


def _fit_with_windows(
    window: Window,
    page_bytes: int,
    window_page_bytes: int,
    *,
    memory: int,
    taken: int,
    longest: int,
    num_seqs: int,
    step_tokens: int,
) -> MemoryFit:
    """Share the remaining memory between full and sliding-window pages, as a server does."""
    num_pages, num_window_pages = max_page_counts(
        memory - taken,
        page_bytes,
        window_page_bytes,
        window,
        num_seqs=num_seqs,
        step_tokens=step_tokens,
    )
    own_window = window.num_held * window_page_bytes
    needed = taken + own_window + -(-longest // window.page_size) * page_bytes
    num_tokens = num_pages * window.page_size
    num_windows = int(window.num_windows(num_window_pages))
    return MemoryFit(needed <= memory, num_tokens, needed, longest, num_windows)


def _kv_bytes(num_values: int, num_rows: int, bytes_per_value: int, in_8_bits: bool) -> int:
    """Bytes of `num_values` keys and values, stored in `num_rows` quantised or plain rows."""
    return num_values + 4 * num_rows if in_8_bits and num_rows else num_values * bytes_per_value


def entries() -> list[Entry]:
    """Every model once: included, downloaded, in local folders, then the missing well-known ones."""
    by_name: dict[str, Entry] = {}
    for name, source, folder in places():
        entry = entry_of(name, source, folder)
        if entry is not None:
            by_name.setdefault(name, entry)
    for suggestion in well_known():
        by_name.setdefault(suggestion.name, suggestion)
    return list(by_name.values())


def disk_free() -> int:
    """Free bytes on the disk that models are downloaded to."""
    folder = hub_cache().absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def places() -> Iterator[tuple[str, Origin, Path]]:
    """Yield (name, source, folder or GGUF file) of every candidate."""
    yield MODEL_NAME, Origin.BUNDLED, model_path()
    for repository in repositories():
        for snapshot in snapshots(repository):
            yield repository, Origin.DOWNLOADED, snapshot
    for source, models in (
        (Origin.DOWNLOADED, hub_models()),
        (Origin.OLLAMA, ollama_models()),
        (Origin.LM_STUDIO, lm_studio_models()),
    ):
        yield from ((name, source, file) for name, file in models)
    if (file := package_model()) is not None:
        yield known_models()[SMOLLM2].names[0], Origin.PACKAGE, file
    home = data_home()
    for pattern, root in (
        ("*", home / "models"),
        ("*/*", Path("~/.lmstudio/models").expanduser()),
    ):
        for folder in sorted(root.glob(pattern)):
            yield str(folder), Origin.FOLDER, folder
    for folder in (home / "models", *sorted((home / "models").glob("*"))):
        yield from ((str(file), Origin.FOLDER, file) for file in files_in(folder))


def entry_of(name: str, source: Origin, folder: Path) -> Entry | None:
    """The model in a folder or GGUF file; None if it is incomplete or in a format we do not read."""
    if folder.is_file():
        return _gguf_entry(name, source, folder)
    config = _json(folder / "config.json")
    weights = sorted(folder.glob("model*.safetensors"))
    index = _json(folder / "model.safetensors.index.json").get("weight_map")
    shards = set(map(str, index.values())) if isinstance(index, dict) else set()
    if not config.get("model_type") or not weights or shards - {file.name for file in weights}:
        return None
    try:
        size = sum(file.stat().st_size for file in weights)
    except OSError:
        return None
    try:
        encoder = text_encoder(ModelFiles(name, folder, config))
    except UnsupportedModel:
        return None
    if encoder is not None:
        return _encoder_entry(name, source, config, size, encoder)
    entry = _entry(name, source, config, size, WeightFormat.MLX)
    if entry is None or not _has_head(name, config, weights, index):
        return entry
    return replace(entry, has_head=True)


def _has_head(name: str, config: Mapping[str, Any], weights: Sequence[Path], index: Any) -> bool:
    """True if the names of the weights are those of a head, too; headers are read where no index lists them."""
    if family_of(config) is None:
        return False
    if isinstance(index, dict) and has_head(index.keys(), config):
        return True
    try:
        return has_head({n for file in weights for n in read_shapes(file, name)}, config)
    except UnsupportedModel:
        return False


def _encoder_entry(
    name: str, source: Origin, config: Mapping[str, Any], size: int, encoder: TextEncoder
) -> Entry | None:
    """Return the entry of a text encoder, which keeps no cache; None if it cannot be loaded."""
    try:
        check_model_config(config, name)
        width = int(config["hidden_size"])
        inner = int(config.get("intermediate_size") or 4 * width)
        heads = int(config["num_attention_heads"])
    except (UnsupportedModel, *_UNFIT):
        return None
    return Entry(
        name,
        source,
        size,
        KVShape(0, has_states=False, num_rows=0),
        encoder.max_length,
        heads,
        width,
        inner,
        purpose="rerank" if encoder.is_reranker else "embedding",
    )


def _gguf_entry(name: str, source: Origin, file: Path) -> Entry | None:
    try:
        header = read_header(file)
        config = model_config(header)
        size = size_in_memory(header)
    except UnsupportedModel:
        return None
    return _entry(name, source, config, size, WeightFormat.GGUF)


def _entry(
    name: str, source: Origin, config: Mapping[str, Any], size: int, kind: WeightFormat
) -> Entry | None:
    """Return the entry of a language model; None if it cannot be loaded."""
    text = with_class_defaults(text_config(config))
    context = context_of(text)
    try:
        check_model_config(config, name)
        kv = kv_shape(text)
        num_heads, _, width = head_sizes(text) if kv.num_values else (0, 0, text["hidden_size"])
        inner = _inner(text, width)
        vocabulary, copied = int(text.get("vocab_size") or 0), copied_of(text)
    except (UnsupportedModel, *_UNFIT):
        return None
    length = context.length if context is not None else 0
    sees = kind is WeightFormat.MLX and bool(config.get("vision_config"))
    drafts = is_assistant(config)
    if drafts:
        # It reads the keys and values of the model that it drafts for.
        kv = KVShape(0, has_states=False)
    return Entry(
        name,
        source,
        size,
        kv,
        length,
        num_heads,
        width,
        inner,
        vocabulary=vocabulary,
        copied=copied,
        format=kind,
        purpose="draft" if drafts else "",
        has_vision=sees,
    )


def _inner(text: Mapping[str, Any], width: int) -> int:
    """Intermediate values per token; for experts, the active experts' inner values and outputs."""
    # Gemma 4 calls them otherwise.
    num_experts = int(text.get("num_experts_per_tok") or text.get("top_k_experts") or 0)
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * width
    # Gemma 3n has one for each layer.
    inner = int(max(inner) if isinstance(inner, list) else inner)
    return num_experts * (inner + width) if num_experts else inner


def _json(file: Path) -> Mapping[str, Any]:
    try:
        content = read_json(file, MAX_TEXT)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@cache
def well_known() -> tuple[Entry, ...]:
    """Well-known models that write, whether they are on this machine or not, smallest first."""
    suggestions = [
        _suggestion(model, model.config) for model in known_models().values() if model.config
    ]
    return tuple(sorted(suggestions, key=lambda entry: entry.weight_size))


def _suggestion(model: KnownModel, config: Mapping[str, Any]) -> Entry:
    """Return the entry of a known model, judged by its config.json as one on this machine is."""
    entry = _entry(model.repository, Origin.SUGGESTED, config, model.weight_size, WeightFormat.MLX)
    assert entry is not None, model.repository
    return replace(entry, has_vision=model.sees, has_head=model.has_head)
