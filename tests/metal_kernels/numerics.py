"""Attention kernels at the shapes of 23 families of models, against float64 numpy, in units of rounding.

    python -m tests.metal_kernels.numerics [--first N] [--every N]

Each family has decodes and chunks in three dtypes and over a cache in 8 bits, on pages of 16 to 64 slots and
contexts of 1 to 777 positions, which are drawn. All unused slots hold NaN. Every third shape runs with all
run-time checks of the emulator. A family with more than four kv heads has four here: they are alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx
import numpy as np

from metal_kernels.latents import LATENT_DIMS
from metal_kernels.ops import Backend
from tests.emulated import emulated_backend
from tests.metal_kernels.latent_oracle import PagedLatents, latent_case
from tests.metal_kernels.oracle import Case, Paged

_MAX_KV_HEADS: Final = 4
_PAGE_SIZES: Final = (16, 32, 64)
_MAX_CONTEXT: Final = 777
_MAX_ROWS: Final = 45
_CHECKED_EVERY: Final = 3
# The smallest step of a dtype's numbers, relative to them.
UNITS: Final = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}
# Units that an answer may be off: (decodes, chunks). A row of a chunk is multiplied with weights that are
# rounded to its dtype.
BOUNDS: Final = {mx.float16: (1.25, 2.5), mx.bfloat16: (1.25, 2.5), mx.float32: (64.0, 64.0)}


@dataclass(frozen=True, slots=True)
class Family:
    """Attention of a family's layers. rotated_dim: of keys beside latents, which head_dim is the width of"""

    name: str
    kv_heads: int
    group: int
    head_dim: int
    rotated_dim: int = 0
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def is_latent(self) -> bool:
        return self.rotated_dim > 0


FAMILIES: Final = (
    Family("Llama 3", 8, 4, 128),
    Family("Llama 3.2 1B", 8, 4, 64),
    Family("Qwen 2.5 7B", 4, 7, 128),
    Family("Qwen 3 0.6B", 8, 2, 128),
    Family("Qwen 3 32B", 8, 8, 128),
    Family("Qwen 3.5 4B", 4, 4, 256),
    Family("Qwen 3.5 27B", 4, 6, 256),
    Family("Qwen 3.6 35B", 2, 8, 256),
    Family("Gemma 2", 8, 2, 256, softcap=50.0),
    Family("Gemma 3", 4, 2, 256, window=512),
    Family("Gemma 4 26B, all positions", 2, 8, 512),
    Family("Gemma 4 12B, all positions", 1, 16, 512),
    Family("gpt-oss", 8, 8, 64, window=128, has_sinks=True),
    Family("Mistral with a window", 8, 4, 128, window=31),
    Family("Phi 3 mini", 32, 1, 96),
    Family("Phi 4 mini", 8, 3, 128),
    Family("SmolLM 2", 3, 3, 64),
    Family("Falcon", 1, 71, 64),
    Family("GLM 4", 2, 16, 128),
    Family("StableLM", 32, 1, 80),
    Family("Nemotron 4", 8, 12, 192),
    Family("DeepSeek V3", 1, 128, *LATENT_DIMS[0]),
    Family("MiniCPM 3", 1, 40, *LATENT_DIMS[1]),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A case of a family. number: its place in `SHAPES`"""

    number: int
    family: Family
    is_decode: bool
    case: Case = field(repr=False)

    @property
    def is_checked(self) -> bool:
        return self.number % _CHECKED_EVERY == 0

    @property
    def kind(self) -> str:
        stored = "q8" if self.case.is_quantised else str(self.case.dtype).rpartition(".")[2]
        return f"{'decodes' if self.is_decode else 'chunks'}, {stored}"

    @property
    def bound(self) -> float:
        """Units of rounding."""
        of_decodes, of_chunks = BOUNDS[self.case.dtype]
        return of_decodes if self.is_decode else of_chunks

    def units_off(self, backend: Backend) -> float:
        """The largest error of a head's row, in units of its dtype; NaN if the answer has one."""
        paged = (PagedLatents if self.family.is_latent else Paged)(backend, self.case)
        return paged.error() / UNITS[self.case.dtype]

    def __str__(self) -> str:
        return f"{self.number} {self.family.name}, {self.kind}"


def _shapes() -> Iterator[Shape]:
    draw = np.random.default_rng(23)
    number = 0
    for family in FAMILIES:
        for dtype, is_quantised, size in _formats(family):
            for is_decode in (True, False):
                sequences = tuple(_decodes(draw) if is_decode else _chunks(draw))
                case = _case(family, sequences, dtype, size, is_quantised=is_quantised)
                yield Shape(number, family, is_decode, case)
                number += 1


def _formats(family: Family) -> Iterator[tuple[mx.Dtype, bool, int]]:
    """Dtypes, whether the cache has 8 bits, and page sizes."""
    for place, dtype in enumerate((mx.bfloat16, mx.float16, mx.float32)):
        yield dtype, False, _PAGE_SIZES[place]
        if family.is_latent:  # these are not stored in 8 bits
            yield dtype, False, _PAGE_SIZES[place - 1]
    if not family.is_latent:
        yield mx.bfloat16, True, _PAGE_SIZES[1]


def _decodes(draw: np.random.Generator) -> Iterator[tuple[int, int]]:
    for low, high in ((1, 2), (2, 64), (64, 400), (400, _MAX_CONTEXT + 1)):
        yield int(draw.integers(low, high)) - 1, 1


def _chunks(draw: np.random.Generator) -> Iterator[tuple[int, int]]:
    yield 0, int(draw.integers(1, _MAX_ROWS))
    rows = int(draw.integers(2, _MAX_ROWS))
    yield int(draw.integers(1, _MAX_CONTEXT - rows)), rows


def _case(
    family: Family,
    sequences: tuple[tuple[int, int], ...],
    dtype: mx.Dtype,
    page_size: int,
    *,
    is_quantised: bool,
) -> Case:
    if family.is_latent:
        dims = family.head_dim, family.rotated_dim
        return latent_case(sequences, family.group, dims, dtype, page_size=page_size)
    return Case(
        sequences,
        page_size,
        kv_heads=min(family.kv_heads, _MAX_KV_HEADS),
        group=family.group,
        key_dim=family.head_dim,
        value_dim=family.head_dim,
        dtype=dtype,
        window=family.window,
        softcap=family.softcap,
        has_sinks=family.has_sinks,
        is_quantised=is_quantised,
    )


SHAPES: Final = tuple(_shapes())


def main() -> None:
    """Print each shape that is beyond its bound, and the worst of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.metal_kernels.numerics")
    parser.add_argument("--first", type=int, default=0, help="number of the first shape")
    parser.add_argument("--every", type=int, default=1, help="take every N-th shape")
    options = parser.parse_args()
    plain, checked = emulated_backend(), emulated_backend(check=True)
    worst: dict[str, tuple[float, Shape]] = {}
    shapes = SHAPES[options.first :: options.every]
    for shape in shapes:
        units = shape.units_off(checked if shape.is_checked else plain)
        if not units <= shape.bound:
            print(f"{shape}: {units:.2f} units, more than {shape.bound}", flush=True)
        before = worst.get(shape.kind)
        if before is None or not units <= before[0]:
            worst[shape.kind] = units, shape
    num_checked = sum(shape.is_checked for shape in shapes)
    print(f"{len(shapes)} shapes, {num_checked} with every check; units of the dtype, at worst:")
    for kind, (units, shape) in sorted(worst.items()):
        print(f"{kind}: {units:.2f} ({shape.family.name})")


if __name__ == "__main__":
    main()
