"""LatentAttention: the tiles and dispatches of attention over latents (MLA) on Metal."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import kernels
from metal_kernels.dispatches import MERGE_THREADS, uploaded_pages
from metal_kernels.kernels import FENCE, SMALLEST_INPUT, Dispatch, Kernels
from metal_kernels.plans import Partitions, rounded, upload
from metal_kernels.tables import SequenceTables

# (dimensions of a latent, of a rotated key): DeepSeek V2 and V3, Kimi, GLM-4.7-Flash, LongCat, Ling;
# MiniCPM 3 and Mistral 4 with 256.
LATENT_DIMS = ((512, 64), (256, 64))

_MAX_LINES = 32  # lines of a tile


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Tiles of lines, a line being one query head of one row, with the keys that they see."""

    tiles: mx.array  # (tiles, 8), as paged_latent.metal lists them
    starts: mx.array | None  # decodes: first partition of each sequence, and the end

    @classmethod
    def of_decodes(cls, tables: SequenceTables, heads: int, lines: int) -> LatentPlan:
        """Plan a tile for each partition of a context and each `lines` heads."""
        cut = Partitions.cut(tables, None, partition_size(heads))
        sequence, begin, end = cut.sequence, cut.begin, cut.end
        count = len(sequence)
        tiles = np.zeros((rounded(count), -(-heads // lines), 8), np.int32)
        # Those without a partition see no key, and write a partial that is never read.
        tiles[:, :, 2] = np.arange(0, heads, lines)
        tiles[:, :, 3] = heads
        tiles[:, :, 7] = np.arange(len(tiles))[:, None] * heads
        positions = tables.context_lens[sequence] - 1
        columns = np.stack([sequence, sequence * heads, positions, begin, end], axis=1)
        tiles[:count, :, [0, 1, 4, 5, 6]] = columns[:, None]
        return cls(upload(tiles.reshape(-1, 8)), upload(cut.starts))

    @classmethod
    def of_chunks(cls, tables: SequenceTables, heads: int, lines: int) -> LatentPlan:
        rows = np.diff(tables.query_starts).astype(np.int64)
        num_lines = rows * heads
        positions = tables.context_lens - rows
        counts = -(-num_lines // lines)
        starts = np.concatenate([[0], np.cumsum(counts)])
        sequence = np.repeat(np.arange(len(tables)), counts)
        first_line = (np.arange(len(sequence)) - starts[sequence]) * lines
        last_line = np.minimum(first_line + lines, num_lines[sequence]) - 1
        first_query = tables.query_starts[sequence].astype(np.int64) * heads
        columns = (
            sequence,
            first_query,
            first_line,
            num_lines[sequence],
            positions[sequence],
            np.zeros(len(sequence)),
            positions[sequence] + last_line // heads + 1,
            first_query,
        )
        return cls(upload(np.stack(columns, axis=1)), None)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.tiles,) if self.starts is None else (self.tiles, self.starts)


class LatentAttention:
    """The dispatches of `paged_latent`, of one backend's kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._numbers: dict[float, mx.array] = {}
        self._no_sinks: dict[tuple[int, mx.Dtype], mx.array] = {}

    def dispatches(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        tables: SequenceTables,
        scale: float,
    ) -> tuple[Dispatch, Dispatch | None]:
        """Return the attention, and for decodes the merge of its partials.

        The arguments have been checked.
        """
        rows, heads, latent_dim = q_latent.shape
        rope_dim, dtype = q_rope.shape[2], q_latent.dtype
        is_decode = rows == len(tables)
        lines = tile_lines(heads) if is_decode else _MAX_LINES
        make = LatentPlan.of_decodes if is_decode else LatentPlan.of_chunks
        tiles, *starts = tables.upload(
            ("latent", heads, lines), lambda tables: make(tables, heads, lines).arrays
        )
        num_tiles = tiles.shape[0]
        numbers = self._numbers_of(scale)
        threads = 4 * lines * _dim_split(latent_dim)
        out = (rows, heads, latent_dim), dtype
        num_partials = num_tiles // -(-heads // lines)
        partials = (num_partials, heads, latent_dim + 4), mx.float32
        attend = self._kernels.dispatch(
            kernels.PAGED_LATENT,
            {"page_tables": uploaded_pages(tables), "tiles": tiles, "numbers": numbers},
            {"out": partials if is_decode else out, "fence": FENCE},
            [
                ("T", dtype),
                ("O", mx.float32 if is_decode else dtype),
                ("LATENT", latent_dim),
                ("ROPE", rope_dim),
                ("KEYS", tile_keys(latent_dim, rope_dim, dtype.size)),
                ("IS_PARTIAL", int(is_decode)),
            ],
            (threads, 1, num_tiles),
            (threads, 1, 1),
        )
        if not starts:
            return attend, None
        merge = self._kernels.dispatch(
            kernels.MERGE_PARTITIONS,
            {"starts": starts[0], "numbers": numbers, "sinks": self._without_sinks(heads, dtype)},
            {"out": out},
            [("T", dtype), ("D", latent_dim)],
            (MERGE_THREADS, heads, rows),
            (MERGE_THREADS, 1, 1),
        )
        return attend, merge

    def _numbers_of(self, scale: float) -> mx.array:
        if scale not in self._numbers:
            self._numbers[scale] = upload([scale, *[0] * 7], np.float32)
        return self._numbers[scale]

    def _without_sinks(self, heads: int, dtype: mx.Dtype) -> mx.array:
        key = (heads, dtype)
        if key not in self._no_sinks:
            self._no_sinks[key] = mx.zeros(max(SMALLEST_INPUT, heads), dtype)
        return self._no_sinks[key]


def partition_size(heads: int) -> int:
    """Keys of one tile of a decode.

    4,096 tokens are 64 threadgroups for any number of heads, and partials (516 floats a head) stay
    below the latents and rotated keys read (576 numbers each) with half of these many heads.
    """
    return 64 if heads <= 32 else 128 if heads <= 64 else 256


def tile_lines(heads: int) -> int:
    """Lines of a decode's tile: the fewest with which `heads` take as few tiles as possible."""
    num_tiles = -(-heads // _MAX_LINES)
    return -(-heads // (8 * num_tiles)) * 8


def tile_keys(latent_dim: int, rope_dim: int, item_size: int) -> int:
    """Keys of a tile.

    The most with which two threadgroups fit in a core's memory, so that one computes while the
    other stages. A core of an M1 or later has 60 KiB, of which Metal gives one threadgroup 32
    (philipturner/metal-benchmarks).
    """
    for keys in (32, 16, 8):
        nbytes = tile_bytes(latent_dim, rope_dim, item_size, keys)
        if nbytes <= 32 << 10 and 2 * nbytes <= 60 << 10:
            return keys
    raise ValueError(f"no tile of latents of {latent_dim} dimensions fits in threadgroup memory")


def tile_bytes(latent_dim: int, rope_dim: int, item_size: int, keys: int) -> int:
    """Threadgroup memory of paged_latent: the tile, and scores of split dimensions."""
    split = _dim_split(latent_dim)
    scores = split * _MAX_LINES * (keys + 4) * 4 if split > 1 else 16
    return keys * ((latent_dim + rope_dim) * item_size + 16) + scores


def _dim_split(latent_dim: int) -> int:
    """Simdgroups that share the dimensions of a line; one has registers for 256."""
    return 2 if latent_dim > 256 else 1
