"""A model of costs: what a decode and a prompt take on a Mac, by bytes, instructions and dispatches.

    decode  =  weights and states / bandwidth + dispatches x the time between two + experts x what each takes besides
               + layers x the longer of keys and values / bandwidth, and instructions / rate
    prompt  =  chunks x the longer of products / rate, and weights / bandwidth
               + layers x the longer of keys and values / bandwidth, and instructions / rate

A computation from public figures of chips, sizes of models, the dispatches of the product's recorded steps, and
what the emulator counts. Nobody has measured any of it on a Mac. It is fitted to five figures that others
published, and `PUBLISHED` says how far it is from the rest. Neither the host's time nor images are in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from metal_kernels.long_chunks import longest_copied
from tests.emulator.counting import MATRIX_PRODUCT
from tests.memory_table import working_set
from tests.perf import instructions
from tests.perf.step_sizes import AttentionLayer, Model, StepSizes, model_of

MODELS: Final = (
    *("lfm2.5:1.2b", "lfm2.5:2.6b", "lfm2.5:8b", "qwen3.5:4b", "qwen3.5:9b", "gemma4:12b"),
    *("gemma4:26b", "bonsai:27b", "qwen3.6:35b", "qwen3.8:27b"),
)
CONTEXTS: Final = (1_024, 8_192, 32_768, 131_072)
PROMPTS: Final = (2_048, 32_768)
CHUNK_ROWS: Final = 512
_MLX_LM_ROWS: Final = 2048  # of a chunk of mlx-lm's

# Fitted to published figures (`PUBLISHED`), one to each.
_MEMORY_SHARE: Final = 0.78  # of the bandwidth on paper, that decodes reach
_DISPATCH: Final = 1.0e-6  # seconds between dependent dispatches
# Seconds that the products of an expert of a layer take in a decode, besides reading it: the matrices are small.
_EXPERT: Final = 11e-6
_BFLOAT16: Final = 0.53  # of the rate of float16, on chips that compute bfloat16 in software
_GATHERED: Final = 0.58  # as `_MLX_EFFICIENCY`, of products of rows sorted by expert

_ISSUED: Final = 4  # instructions of simdgroups a clock and core
_FUSED_ADDS: Final = 512 / MATRIX_PRODUCT  # multiply-adds of an instruction in 8x8 matrices
# Of MLX's products, relative to their multiply-adds alone: 0.76 to 0.84.
_MLX_EFFICIENCY: Final = 0.8
# Rows of a tile of MLX's products of rows sorted by expert. A tile whose rows have several experts is
# multiplied once for each (`gather_qmm_rhs` in mlx/backend/metal/quantized.cpp).
_EXPERT_ROWS: Final = 16
# Of mlx-lm's kernel of the gated delta rule, for a row of 128 numbers and a token, counted in its text.
_RECURRENCE: Final = 55


@dataclass(frozen=True, slots=True)
class Chip:
    """Public figures. memory: GB of a usual machine

    matrix_units: how much faster MLX's own products are than by ALUs; other kernels use none of it
    has_bfloat16: from the M3 on; models are in bfloat16
    """

    name: str
    cores: int
    ghz: float
    bandwidth: float  # GB/s
    memory: int
    matrix_units: float = 1.0
    has_bfloat16: bool = True

    @property
    def rate(self) -> float:
        """Instructions of simdgroups a second."""
        return _ISSUED * self.cores * self.ghz * 1e9

    @property
    def adds(self) -> float:
        """Multiply-adds a second in matrices of a model's numbers, at best."""
        return self.rate * _FUSED_ADDS * (1.0 if self.has_bfloat16 else _BFLOAT16)

    @property
    def bytes_per_second(self) -> float:
        """What decodes reach."""
        return self.bandwidth * _MEMORY_SHARE * 1e9


CHIPS: Final = (
    Chip("M1", 8, 1.278, 68, 16, has_bfloat16=False),
    Chip("M2 Pro", 19, 1.398, 200, 32, has_bfloat16=False),
    Chip("M3 Max", 40, 1.38, 400, 64),
    Chip("M4 Pro", 20, 1.578, 273, 48),
    Chip("M5", 10, 1.62, 153, 24, matrix_units=2.9),
    Chip("M3 Ultra", 80, 1.4, 819, 256),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step, by what they are spent on."""

    weights: float  # reading them, or multiplying them with the rows of a chunk
    dispatches: float
    keys: float  # reading keys and values
    arithmetic: float  # of attention and recurrences, which runs while keys are read

    @property
    def seconds(self) -> float:
        return self.weights + self.dispatches + max(self.keys, self.arithmetic)

    @property
    def is_bound_by_arithmetic(self) -> bool:
        """Attention, by its instructions and not by memory."""
        return self.arithmetic > self.keys


def decode_step(chip: Chip, sizes: StepSizes, num_dispatches: int, context: int) -> Prediction:
    """One token of one sequence with `context` positions."""
    read = sizes.weights + sizes.expert_weights + 2 * sizes.state
    gathered = sizes.num_used * sizes.num_expert_layers * _EXPERT
    keys = arithmetic = 0.0
    for layer, num in Counter(sizes.layers).items():
        seen = num * layer.seen(context)
        keys += seen * _kv_bytes(layer) / chip.bytes_per_second
        each = instructions.decode(layer.heads // layer.kv_heads, layer.head_dim)
        arithmetic += seen * layer.heads * each / chip.rate
    return Prediction(
        read / chip.bytes_per_second + gathered, num_dispatches * _DISPATCH, keys, arithmetic
    )


def chunk(chip: Chip, sizes: StepSizes, start: int, rows: int) -> Prediction:
    """`rows` rows after `start` positions, by the tile kernel or by MLX's attention over copies, as the engine
    chooses."""
    keys = 0.0
    arithmetic = rows * sizes.recurrent_rows * _RECURRENCE / chip.rate
    for layer, num in Counter(sizes.layers).items():
        context = layer.seen(start + rows)
        read = num * (context if layer.window is None else min(start + rows, context + rows))
        in_pages = read * _kv_bytes(layer) / chip.bytes_per_second
        pairs = num * rows * layer.heads * min(context, start + rows / 2)
        longest = longest_copied(
            rows, layer.kv_heads, layer.head_dim, mx.bfloat16, memory=chip.memory << 30
        )
        if start + rows <= longest:
            arithmetic += pairs * _by_mlx(chip, layer)
            keys += 3 * in_pages  # read, written, read again
        else:
            arithmetic += pairs * instructions.tiles(layer.head_dim) / chip.rate
            keys += in_pages
    return Prediction(_products(chip, sizes, rows), 0.0, keys, arithmetic)


def prompt(chip: Chip, sizes: StepSizes, length: int) -> float:
    """Seconds until a prompt is computed, in chunks of `CHUNK_ROWS`."""
    starts = range(0, length, CHUNK_ROWS)
    return sum(
        chunk(chip, sizes, start, min(CHUNK_ROWS, length - start)).seconds for start in starts
    )


def _products(chip: Chip, sizes: StepSizes, rows: int) -> float:
    """Seconds of a chunk's products with weights."""
    multiplied = sizes.products / _MLX_EFFICIENCY
    read = sizes.weights + sizes.all_experts
    if sizes.num_experts:
        pairs = rows * sizes.num_used
        tiles = pairs / _EXPERT_ROWS + sizes.num_experts - 1
        multiplied += sizes.expert_products * tiles * _EXPERT_ROWS / pairs / _GATHERED
    by_alus = rows * multiplied / chip.adds / chip.matrix_units
    return max(by_alus, read / chip.bytes_per_second)


def _by_mlx(chip: Chip, layer: AttentionLayer) -> float:
    """Seconds of MLX's attention for a key and head of a row."""
    return 2 * layer.head_dim / _MLX_EFFICIENCY / chip.adds / chip.matrix_units


def _kv_bytes(layer: AttentionLayer) -> int:
    """Of a position."""
    return 2 * layer.kv_heads * layer.head_dim * mx.bfloat16.size


@dataclass(frozen=True, slots=True)
class Published:
    """Somebody's decode of one short answer, and prompt of `prompt_length` tokens, in tokens/s; 0 if not said.

    of_long: the decode after 8,192 tokens, which depends on a program's own kernels
    fitted: what of this model of costs follows from it
    """

    chip: Chip
    model: str
    source: str
    decode: float
    prompt: float = 0.0
    of_long: float = 0.0
    bits: int = 0  # 0 for those of the catalogue
    fitted: frozenset[str] = frozenset()
    prompt_length: int = 8_192

    @property
    def of_catalogue(self) -> Model:
        return model_of(self.model, self.bits)

    @property
    def computed_decode(self) -> float:
        """Of the same step, whose layers are as mlx-lm's definition has them; attention does not matter."""
        model = self.of_catalogue
        short = replace(model.sizes, layers=())
        return 1 / decode_step(self.chip, short, model.dispatches_as_defined, 0).seconds

    @property
    def computed_prompt(self) -> float:
        """In mlx-lm's chunks, by MLX's own attention."""
        sizes, seconds = self.of_catalogue.sizes, 0.0
        recurrent = sizes.recurrent_rows * _RECURRENCE / self.chip.rate
        for start in range(0, self.prompt_length, _MLX_LM_ROWS):
            seconds += _products(self.chip, sizes, _MLX_LM_ROWS) + _MLX_LM_ROWS * recurrent
            for layer in sizes.layers:
                pairs = layer.heads * min(
                    layer.seen(start + _MLX_LM_ROWS), start + _MLX_LM_ROWS / 2
                )
                seconds += _MLX_LM_ROWS * pairs * _by_mlx(self.chip, layer)
        return self.prompt_length / seconds

    @property
    def errors(self) -> dict[str, float]:
        """How far the computed figures are from the published ones, relative to these."""
        found = {"decode": self.computed_decode / self.decode - 1}
        if self.prompt:
            found["prompt"] = self.computed_prompt / self.prompt - 1
        return found


_M2_PRO, _M4_PRO, _M3_ULTRA = (
    next(chip for chip in CHIPS if chip.name == name) for name in ("M2 Pro", "M4 Pro", "M3 Ultra")
)
_SMALL_M2_PRO: Final = replace(_M2_PRO, cores=16)  # with 10 cores of its processor
_RAPID: Final = "Rapid-MLX, August 2026"
_DECODE, _PROMPT = frozenset({"decode"}), frozenset({"prompt"})
PUBLISHED: Final = (
    Published(_M2_PRO, "llama3.1:8b", "llmfit #1031", 36.2, fitted=_DECODE),
    Published(_M4_PRO, "qwen3:0.6b", "vllm-mlx #531", 284, bits=8, fitted=_DECODE),
    Published(Chip("M4", 10, 1.47, 120, 16), "qwen3:8b", "normiebench #3, llama.cpp", 20.9),
    Published(_M3_ULTRA, "qwen3:8b", "Rapid-MLX #636", 112.9),
    Published(
        Chip("M3 Pro", 18, 1.38, 150, 36), "qwen3:4b", "mlx-lm #1569", 44.6, 615, prompt_length=2048
    ),
    Published(
        Chip("M4 Max", 40, 1.578, 546, 128),
        *("qwen3:4b", "mlx-lm's BENCHMARKS.md", 134.5, 1_622),
        prompt_length=2048,
    ),
    Published(_SMALL_M2_PRO, "lfm2.5:1.2b", _RAPID, 208, 1_084, 124),
    Published(_SMALL_M2_PRO, "lfm2.5:2.6b", _RAPID, 93.5, 473, 65.0),
    Published(_SMALL_M2_PRO, "lfm2.5:8b", _RAPID, 118, 618, 82.5, fitted=_PROMPT),
    Published(_SMALL_M2_PRO, "qwen3.5:4b", _RAPID, 60.7, 303, 39.9),
    Published(_SMALL_M2_PRO, "qwen3.5:9b", _RAPID, 35.7, 166, 30.5, fitted=_PROMPT),
    Published(_SMALL_M2_PRO, "gemma4:12b", _RAPID, 22.3, 105, 19.0),
    Published(_SMALL_M2_PRO, "gemma4:26b", _RAPID, 49.5, 269, 36.9),
    Published(_SMALL_M2_PRO, "bonsai:27b", _RAPID, 17.5, 164, 15.0),
    Published(_SMALL_M2_PRO, "qwen3.5:35b", _RAPID, 58.5, 287, 21.1, fitted=_DECODE),
    Published(_SMALL_M2_PRO, "qwen3.6:27b", _RAPID, 11.0, 46.7, 10.1),
)
MAX_ERROR: Final = 0.15  # of a figure that the model is not fitted to, or the table says so


def tables() -> Iterator[str]:
    """Markdown: published figures beside computed ones, then every chip and model."""
    yield "Computed from public figures of chips, counted instructions and dispatches of recorded steps."
    yield "Nothing here was measured on a Mac.\n"
    yield from published_table()
    yield ""
    yield from decline_table()
    yield ""
    yield from chip_table()


def published_table() -> Iterator[str]:
    """Decodes of short answers and prompts, of mlx-lm unless the source has another program."""
    yield "| Chip, model, source | decode, tokens/s | computed | | prompt, tokens/s | computed | |"
    yield "|---|---|---|---|---|---|---|"
    for each in PUBLISHED:
        bits = f" in {each.bits} bits" if each.bits else ""
        cells = [f"{each.chip.name}, {each.model}{bits} ({each.source})"]
        for what, figure in (("decode", each.decode), ("prompt", each.prompt)):
            if not figure:
                cells += ["", "", ""]
                continue
            error = each.errors[what]
            remark = "fitted" if what in each.fitted else f"{100 * error:+.0f} %"
            if abs(error) > MAX_ERROR:
                remark += ", not explained"
            cells += [f"{figure:,g}", _digits(figure * (1 + error), 3), remark]
        yield f"| {' | '.join(cells)} |"


def decline_table() -> Iterator[str]:
    """Decodes after 8,192 tokens relative to short ones: of others, and as computed with our kernels."""
    yield "| Decode after 8,192 tokens relative to a short one, M2 Pro | published | with our kernels |"
    yield "|---|---|---|"
    for each in PUBLISHED:
        if each.of_long:
            model = each.of_catalogue
            short, long = (
                decode_step(each.chip, model.sizes, model.dispatches, context).seconds
                for context in (128, 8_192)
            )
            yield f"| {each.model} | {each.of_long / each.decode:.2f} | {short / long:.2f} |"


def chip_table() -> Iterator[str]:
    """Tokens/s of every chip and model: decodes by positions, then prompts by length."""
    decodes = " | ".join(f"{context // 1024}k" for context in CONTEXTS)
    prompts = " | ".join(f"prompt of {length // 1024}k" for length in PROMPTS)
    yield f"| Chip | Model | {decodes} | {prompts} |"
    yield f"|---|---|{'---|' * (len(CONTEXTS) + len(PROMPTS))}"
    for chip in CHIPS:
        for name in MODELS:
            model = model_of(name)
            sizes = model.sizes
            cells = [
                _digits(1 / decode_step(chip, sizes, model.dispatches, context).seconds)
                if _fits(chip, sizes, context)
                else "-"
                for context in CONTEXTS
            ]
            cells += [
                _digits(length / prompt(chip, sizes, length)) if _fits(chip, sizes, length) else "-"
                for length in PROMPTS
            ]
            yield f"| {chip.name}, {chip.memory} GB | {name} | {' | '.join(cells)} |"


def _fits(chip: Chip, sizes: StepSizes, context: int) -> bool:
    """Weights, states, and keys and values, without a step's own memory."""
    kept = sum(layer.seen(context) * _kv_bytes(layer) for layer in sizes.layers)
    weights = sizes.weights + sizes.all_experts
    return weights + kept + sizes.state <= working_set(chip.memory)


def _digits(figure: float, num: int = 2) -> str:
    """With so many digits: of what is computed no more than two are known."""
    rounded = float(f"{figure:.{num}g}")
    return f"{rounded:,g}"
