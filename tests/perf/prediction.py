"""A model of costs: what a decode step and a chunk of a prompt take on a Mac, by bytes, instructions and
dispatches.

    step   =  weights / bandwidth + dispatches x the time between two
              + layers x the longer of keys and values / bandwidth, and instructions / rate
    chunk  =  products of the weights / rate + layers x instructions / rate

A computation from public figures of chips, sizes of models, and what the emulator counts. Nobody has measured
any of it on a Mac: it says which of the three bounds a step, and how a change of a kernel moves it. Sliding
windows and states are not in it, nor the host's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from metal_kernels import quantised
from metal_kernels.long_chunks import longest_copied
from tests.emulator.counting import MATRIX_PRODUCT
from tests.geometries import QWEN3_4B, QWEN3_8B, QWEN3_32B, Geometry, StepShape, operations
from tests.perf import instructions

QWEN3_0_6B: Final = Geometry(
    "Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936, 40_960, 335_000_000, is_tied=True
)
LLAMA_70B: Final = Geometry(
    "Llama-3.3-70B", 80, 8192, 64, 8, 128, 28_672, 128_256, 131_072, 39_700_000_000
)
MODELS: Final = (QWEN3_0_6B, QWEN3_4B, QWEN3_8B, QWEN3_32B, LLAMA_70B)  # in 4 bits
CONTEXTS: Final = (1_024, 8_192, 32_768, 131_072)
CHUNK_ROWS: Final = 512

# Fitted to published decodes: of Llama 8B on an M2 Pro, which is bound by memory, and of Qwen3-0.6B on an
# M4 Pro, which depends on dispatches (`PUBLISHED`).
_MEMORY_SHARE: Final = 0.84  # of the bandwidth on paper, that decodes reach
_DISPATCH: Final = 1.3e-6  # seconds between dependent dispatches
_ISSUED: Final = 4  # instructions of simdgroups a clock and core
_FUSED_ADDS: Final = 512 / MATRIX_PRODUCT  # multiply-adds of an instruction in 8x8 matrices
_MLX_EFFICIENCY: Final = (
    0.8  # of MLX's products, relative to their multiply-adds alone: 0.76 to 0.84
)


@dataclass(frozen=True, slots=True)
class Chip:
    """Public figures. memory: GB of a usual machine, which decides where chunks are copied

    matrix_units: how much faster MLX's own products are than by ALUs; other kernels use none of it
    """

    name: str
    cores: int
    ghz: float
    bandwidth: float  # GB/s
    memory: int
    matrix_units: float = 1.0

    @property
    def rate(self) -> float:
        """Instructions of simdgroups a second."""
        return _ISSUED * self.cores * self.ghz * 1e9

    @property
    def bytes_per_second(self) -> float:
        """What decodes reach."""
        return self.bandwidth * _MEMORY_SHARE * 1e9


CHIPS: Final = (
    Chip("M1", 8, 1.278, 68, 16),
    Chip("M2 Pro", 19, 1.398, 200, 32),
    Chip("M3 Max", 40, 1.38, 400, 64),
    Chip("M4 Pro", 20, 1.578, 273, 48),
    Chip("M5", 10, 1.62, 153, 24, matrix_units=2.9),
    Chip("M3 Ultra", 80, 1.4, 819, 256),
)


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """Instructions for a key and head, of decodes by (query heads per kv head, in 8 bits), and of tiles.

    built_by: whose step of decodes the dispatches of a layer are counted in: `host.layer_dispatches` has the names
    """

    decode: Callable[[int, bool], float]
    tiles: Callable[[bool], float]
    built_by: str = "ours"


@functools.cache
def layer_dispatches(built_by: str) -> int:
    """Of a layer of Qwen3 in a step of decodes, as it is built."""
    from tests.perf import host

    return host.layer_dispatches("qwen3", lambda model: model.decoding(2), built_by).total()


# As counted in the texts before groups were multiplied by matrices and tiles skipped their shrink.
TILES_BEFORE: Final = {False: 12.2, True: 13.2}
BEFORE: Final = AttentionCosts(
    lambda group, is_quantised: instructions.decode(
        group, is_quantised=is_quantised, uses_matrices=False
    ),
    TILES_BEFORE.__getitem__,
    "ours, not fused",
)
NOW: Final = AttentionCosts(
    lambda group, is_quantised: instructions.decode(group, is_quantised=is_quantised),
    lambda is_quantised: instructions.tiles(is_quantised=is_quantised),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step, by what they are spent on."""

    weights: float
    dispatches: float
    keys: float  # reading keys and values
    arithmetic: float  # of attention, which runs while keys are read

    @property
    def seconds(self) -> float:
        return self.weights + self.dispatches + max(self.keys, self.arithmetic)

    @property
    def is_bound_by_arithmetic(self) -> bool:
        """Attention, by its instructions and not by memory."""
        return self.arithmetic > self.keys


def decode_step(
    chip: Chip,
    model: Geometry,
    context: int,
    kernels: AttentionCosts = NOW,
    *,
    batch: int = 1,
    is_quantised: bool = False,
) -> Prediction:
    """One token for each of `batch` sequences with `context` positions."""
    group = model.heads // model.kv_heads
    keys = batch * context * _kv_bytes(model, is_quantised)
    pairs = batch * context * model.heads * model.num_layers
    shape = StepShape(batch, num_decodes=batch, decode_context=context, num_sampled=batch)
    # Besides layers: the embedding, the head and the sampler.
    others = operations(replace(model, num_layers=0), shape, 32)
    dispatches = sum(operation.num_dispatches for operation in others)
    dispatches += model.num_layers * layer_dispatches(kernels.built_by)
    return Prediction(
        model.weight_size / chip.bytes_per_second,
        dispatches * _DISPATCH,
        keys / chip.bytes_per_second,
        pairs * kernels.decode(group, is_quantised) / chip.rate,
    )


def prefill_chunk(
    chip: Chip,
    model: Geometry,
    context: int,
    kernels: AttentionCosts = NOW,
    *,
    rows: int = CHUNK_ROWS,
    is_quantised: bool = False,
) -> Prediction:
    """`rows` rows, the last of which sees `context` positions, by the tile kernel or by MLX's attention over
    copies, as the engine chooses."""
    products = rows * _parameters(model) / _FUSED_ADDS / _MLX_EFFICIENCY
    pairs = rows * (context - rows / 2) * model.heads * model.num_layers
    keys = context * _kv_bytes(model, is_quantised) / chip.bytes_per_second
    longest = longest_copied(
        rows, model.kv_heads, model.head_dim, mx.bfloat16, memory=chip.memory << 30
    )
    if context <= longest:
        each = 2 * model.head_dim / _FUSED_ADDS / _MLX_EFFICIENCY / chip.matrix_units
        keys *= 3  # read, written, read again
    else:
        each = kernels.tiles(is_quantised)
    return Prediction(products / chip.rate / chip.matrix_units, 0.0, keys, pairs * each / chip.rate)


def _parameters(model: Geometry) -> int:
    """Of all layers, which every row is multiplied by."""
    attention = 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    return model.num_layers * (attention + 3 * model.hidden * model.inner)


def _kv_bytes(model: Geometry, is_quantised: bool) -> int:
    """Of a position, in all layers."""
    dtype = quantised.DTYPE if is_quantised else mx.bfloat16
    row = quantised.row_width(model.head_dim, dtype) * dtype.size
    return 2 * model.num_layers * model.kv_heads * row


@dataclass(frozen=True, slots=True)
class Published:
    """Somebody's decode of one answer, in tokens/s. is_fitted: a constant of this file follows from it."""

    chip: Chip
    model: Geometry
    tokens_per_second: float
    source: str
    is_fitted: bool = False

    @property
    def computed(self) -> float:
        """Of the same step, whose layers are as their definition has them."""
        return 1 / decode_step(self.chip, self.model, 256, AS_DEFINED).seconds

    @property
    def error(self) -> float:
        return self.computed / self.tokens_per_second - 1


# Contexts are short: attention does not matter.
AS_DEFINED: Final = AttentionCosts(lambda *_: 0.0, lambda _: 0.0, "mlx-lm")
_LLAMA_8B: Final = Geometry(
    "Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 4_517_000_000
)
_QWEN3_0_6B_8_BITS: Final = replace(QWEN3_0_6B, name="Qwen3-0.6B, 8 bits", weight_size=635_000_000)
_M2_PRO, _M4_PRO, _M3_ULTRA = (
    next(chip for chip in CHIPS if chip.name == name) for name in ("M2 Pro", "M4 Pro", "M3 Ultra")
)
PUBLISHED: Final = (
    Published(_M2_PRO, _LLAMA_8B, 36.2, "llmfit #1031", is_fitted=True),
    Published(_M4_PRO, _QWEN3_0_6B_8_BITS, 284, "vllm-mlx #531", is_fitted=True),
    Published(Chip("M4", 10, 1.47, 120, 16), QWEN3_8B, 20.9, "normiebench #3, llama.cpp"),
    Published(_M3_ULTRA, QWEN3_8B, 112.9, "Rapid-MLX #636"),
    Published(Chip("M3 Pro", 18, 1.38, 150, 36), QWEN3_4B, 44.6, "mlx-lm #1569"),
    Published(Chip("M4 Max", 40, 1.578, 546, 128), QWEN3_4B, 134.5, "mlx-lm BENCHMARKS.md"),
)
MAX_ERROR: Final = 0.15  # of a figure that the model is not fitted to, or the table says so


def _published_table() -> Iterator[str]:
    yield "| Chip, model in 4 bits, source | published tokens/s | computed | |"
    yield "|---|---|---|---|"
    for each in PUBLISHED:
        remark = "fitted" if each.is_fitted else f"{each.error:+.0%}"
        if abs(each.error) > MAX_ERROR:
            remark += ": the model does not explain it"
        name = f"{each.chip.name}, {each.model.name}, {each.source}"
        yield f"| {name} | {each.tokens_per_second:g} | {each.computed:.1f} | {remark} |"


def tables() -> Iterator[str]:
    """Markdown: published figures, the kernels' instructions, then every chip and model, before and now."""
    yield "Computed from public figures of chips and from counted instructions."
    yield "Nothing here was measured on a Mac.\n"
    yield "Decodes of mlx-lm as others published them, and as computed:\n"
    yield from _published_table()
    yield ""
    yield from _kernel_table()
    for title, of_step in (("Decode of one answer", decode_step), ("Chunk", prefill_chunk)):
        yield f"\n{title}, ms before -> now, by positions; * bound by the ALUs of attention\n"
        yield from _step_table(of_step)


def _kernel_table() -> Iterator[str]:
    yield "| Instructions a key and head, head dimension 128 | before | now |"
    yield "|---|---|---|"
    for is_quantised in (False, True):
        for group in (1, 4, 8, 16):
            counts = (kernels.decode(group, is_quantised) for kernels in (BEFORE, NOW))
            yield _row(f"decode, {group} heads a kv head{_suffix(is_quantised)}", counts)
    for is_quantised in (False, True):
        counts = (kernels.tiles(is_quantised) for kernels in (BEFORE, NOW))
        yield _row(f"rows of a chunk, by tiles{_suffix(is_quantised)}", counts)


def _row(name: str, counts: Iterator[float]) -> str:
    return f"| {name} | {' | '.join(f'{count:.1f}' for count in counts)} |"


def _suffix(is_quantised: bool) -> str:
    return ", q8" if is_quantised else ""


def _step_table(of_step: Callable[..., Prediction]) -> Iterator[str]:
    yield f"| Chip | Model | {' | '.join(f'{context:,}' for context in CONTEXTS)} |"
    yield f"|---|---|{'---|' * len(CONTEXTS)}"
    for chip in CHIPS:
        for model in MODELS:
            for is_quantised in (False, True):
                cells = []
                for context in CONTEXTS:
                    before, now = (
                        of_step(chip, model, context, kernels, is_quantised=is_quantised)
                        for kernels in (BEFORE, NOW)
                    )
                    cells.append(f"{_ms(before)} -> {_ms(now)}")
                name = f"{model.name}{_suffix(is_quantised)}"
                yield f"| {chip.name} | {name} | {' | '.join(cells)} |"


def _ms(prediction: Prediction) -> str:
    return f"{prediction.seconds * 1e3:.1f}{'*' if prediction.is_bound_by_arithmetic else ''}"
