"""Chooses at load how long chunks attend: each shape of a model's layers is timed once on a machine.

The times are kept on disk, because a choice that changed with every start would change the last bits of
answers. Another chip, or another version of mlx or mlxserve, is timed anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_kernels import cooperative_tiles
from metal_kernels.choice import has_metal
from metal_kernels.chunk_trial import (
    MAX_CONTEXT,
    ROWS,
    ChunkTimes,
    Timer,
    WayTimes,
    seconds_of,
    time_chunks,
)
from metal_kernels.cooperative_trial import why_not_cooperative
from metal_kernels.long_chunks import copying, use_timed
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend
from metal_kernels.speeds import TimedAttention
from metal_kernels.step_ways import StepWay
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.config import data_home
from mlxserve.core.version import __version__
from mlxserve.model.load import LoadedModel
from mlxserve.model.work import num_query_heads
from mlxserve.system.files import read_own_json, replace_file

log = logging.getLogger("mlxserve.chunks")

FILE_NAME = "chunk-times.json"
_MAX_BYTES = 1 << 20
_OF_ANOTHER = "but the choice is that of a model loaded before, whose answers would change with it"


class KeptTimes:
    """Times of this chip and these versions, in a file."""

    def __init__(self, file: Path, chip: str) -> None:
        self._file = file
        self._of = [chip, f"mlx {version('mlx')}", f"mlxserve {__version__}"]

    def all(self) -> dict[str, ChunkTimes]:
        """Times by the shape's label; none if there is no file, or it is another machine's."""
        try:
            content = read_own_json(self._file, _MAX_BYTES)
            if content["of"] != self._of:
                return {}
            return {str(label): _times_of(rows) for label, rows in content["shapes"].items()}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return {}

    def keep(self, label: str, times: ChunkTimes) -> None:
        """Best effort: without the file, the next start measures again."""
        kept = {**self.all(), label: times}
        shapes = {each: list(map(list, of.by_rows.items())) for each, of in kept.items()}
        content = json.dumps({"of": self._of, "shapes": shapes})
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, content.encode())


def _times_of(rows: Any) -> ChunkTimes:
    """Raises ValueError and TypeError for anything but what `keep` wrote."""
    by_rows = {}
    for each, (tiles, *others) in rows:
        fused, unfused, cooperative = (None if time is None else float(time) for time in others)
        by_rows[int(each)] = WayTimes(float(tiles), fused, unfused, cooperative)
    if tuple(by_rows) != ROWS:
        raise ValueError("other numbers of rows were timed")
    return ChunkTimes(by_rows)


def kept_times() -> KeptTimes:
    """The file of this machine's GPU."""
    return KeptTimes(data_home() / FILE_NAME, str(mx.device_info().get("device_name", "unknown")))


def choose_chunks(
    loaded: LoadedModel, backends: Sequence[Backend], timer: Timer = seconds_of
) -> None:
    """Time the chunks of the model's layers, unless that was done on this machine before.

    Nothing is timed without Metal, in several processes, or where copies failed their self-test.
    """
    backend = next((each for each in backends if isinstance(each, MetalBackend)), None)
    if backend is None or not has_metal() or loaded.group is not None or loaded.by_sequence:
        return
    if not backend.without.isdisjoint({StepWay.GATHERED, StepWay.BLOCKS}):
        return
    kept = kept_times()
    has_ends = loaded.vision is not None and loaded.vision.bidirectional is not None
    for what in _shapes(loaded):
        label = label_of(what)
        times = kept.all().get(label)
        reason = why_not_cooperative(backend, what, has_ends=has_ends)
        if reason is not None:
            cooperative_tiles.refuse(what.head_dim, what.dtype)
        if times is None:
            times = time_chunks(backend, what, timer, has_cooperative=reason is None)
            if times is None:
                continue
            kept.keep(label, times)
        _use(what, times)
        choice = times.choice(what.kv_heads * what.group)
        is_used = copying(what.head_dim, what.dtype) == choice
        kept_choice = "" if is_used else f"; {_OF_ANOTHER}"
        log.info("Chunks of %s by %s%s", label, times, kept_choice)
        if reason is not None:
            log.info("Chunks of %s without cooperative tensors: %s", label, reason)


def _use(what: TimedAttention, times: ChunkTimes) -> None:
    """Let chunks attend as was timed, unless a model before decided it or a trial failed."""
    use_timed(what.head_dim, what.dtype, times.choice(what.kv_heads * what.group))
    cooperative_tiles.use_timed(what.head_dim, what.dtype, times.first_cooperative)


def _shapes(loaded: LoadedModel) -> Iterator[TimedAttention]:
    """Return the layer of each head dimension that sees the most positions."""
    num_heads = num_query_heads(loaded)
    shapes: dict[tuple[int, mx.Dtype], TimedAttention] = {}
    for spec in loaded.layers:
        if spec.is_latent or spec.key_dim != spec.value_dim:
            continue
        what = _timed(spec, loaded.context.longest, num_heads)
        key = what.head_dim, what.dtype
        if key not in shapes or shapes[key].context < what.context:
            shapes[key] = what
    yield from shapes.values()


def _timed(spec: LayerSpec, longest: int, num_heads: int) -> TimedAttention:
    return TimedAttention(
        longest if spec.window is None else min(longest, spec.window),
        kv_heads=spec.kv_heads,
        head_dim=spec.key_dim,
        dtype=spec.dtype,
        group=max(1, num_heads // spec.kv_heads),
        is_quantised=spec.is_quantised,
    )


def label_of(what: TimedAttention) -> str:
    """Describe a layer: `8 kv heads of 128, 4 query heads each, bfloat16, 4096 positions`."""
    dtype = str(what.dtype).rpartition(".")[2]
    stored = ", q8" if what.is_quantised else ""
    heads = f"{what.kv_heads} kv heads of {what.head_dim}, {what.group} query heads each"
    return f"{heads}, {dtype}{stored}, {min(what.context, MAX_CONTEXT)} positions"
