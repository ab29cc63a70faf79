"""The kernels: their texts, their buffers, and the factories that build them.

A *factory* makes a kernel callable from its spec and text. `on_metal` does it through MLX; tests
pass factories of their own, which take the same call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import mlx.core as mx

from metal_kernels.first_page import first_page

Template: TypeAlias = Sequence[tuple[str, "int | mx.Dtype"]]
Size: TypeAlias = tuple[int, int, int]

_FOLDER = Path(__file__).parent / "msl"
_COMMENT = re.compile(r"(?<![ \t])[ \t]*+//.*")  # including the blanks before it

FENCE = ((8,), mx.int32)  # shape and dtype
# Elements; MLX passes smaller inputs in another address space.
SMALLEST_INPUT = 8


def _text(file: str) -> str:
    """Read a kernel's text without comments: MLX hashes it at every evaluation."""
    text = (_FOLDER / file).read_text(encoding="utf-8")
    # Line numbers stay right, for messages.
    return _COMMENT.sub("", text)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel's name and buffers, in the order of the signature that MLX writes."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes_pools: bool = False  # though they are inputs; checked runs hold a kernel to it
    # Outputs that are written in part, and never read elsewhere; checked runs hold a kernel to it.
    partly_written: tuple[str, ...] = ()
    header: str = field(default="", repr=False)  # the functions that its text calls

    def source(self) -> str:
        """Return the body of the kernel's function."""
        return _text(f"{self.name}.metal")


HEADERS = {file: _text(file) for file in ("attention.h", "cooperative.h", "quantise.h")}

_MOVED = ("moves", "k_pool", "v_pool", "after_a", "after_b")
WRITE_KV_TOKENS = KernelSpec(
    "write_kv_tokens", ("keys", "values", *_MOVED), ("fence",), writes_pools=True
)
WRITE_KV_PAGES = KernelSpec(
    "write_kv_pages", ("keys", "values", *_MOVED), ("fence",), writes_pools=True
)
QUANTISE_KV = KernelSpec(
    "quantise_kv",
    ("keys", "values", *_MOVED),
    ("fence",),
    writes_pools=True,
    header=HEADERS["quantise.h"],
)
ROTATE_AND_WRITE = KernelSpec(
    "rotate_and_write",
    ("queries", "keys", "values", "turns", "q_weight", "k_weight", "numbers", *_MOVED),
    ("rotated", "fence"),
    writes_pools=True,
    header=HEADERS["quantise.h"],
)
COPY_PAGES = KernelSpec("copy_pages", _MOVED, ("fence",), writes_pools=True)
GATHER_PAGES = KernelSpec(
    "gather_pages",
    ("k_pool", "v_pool", "pages", "after"),
    ("keys", "values", "fence"),
    partly_written=("keys", "values"),
    header=HEADERS["attention.h"],
)
PAGED_DECODE = KernelSpec(
    "paged_decode",
    ("queries", "k_pool", "v_pool", "page_tables", "partitions", "numbers", "after"),
    ("partials", "fence"),
    header=HEADERS["attention.h"],
)
GROUPED_DECODE = replace(PAGED_DECODE, name="grouped_decode")
DRAFT_DECODE = KernelSpec(
    "draft_decode",
    ("queries", "k_pool", "v_pool", "page_tables", "partitions", "units", "numbers", "after"),
    ("partials", "fence"),
    partly_written=("partials",),  # those of partitions that only pad a list
    header=HEADERS["attention.h"],
)
GROUPED_DRAFTS = replace(DRAFT_DECODE, name="grouped_drafts")
MERGE_PARTITIONS = KernelSpec(
    "merge_partitions",
    ("partials", "starts", "sinks", "numbers"),
    ("out",),
    header=HEADERS["attention.h"],
)
PAGED_PREFILL = KernelSpec(
    "paged_prefill",
    ("queries", "k_pool", "v_pool", "page_tables", "tiles", "ends", "numbers", "sinks", "after"),
    ("out", "fence"),
    header=HEADERS["attention.h"],
)
# Metal 4 only: taken where a trial finds the results of PAGED_PREFILL, sooner.
COOPERATIVE_PREFILL = replace(
    PAGED_PREFILL,
    name="cooperative_prefill",
    header=HEADERS["attention.h"] + HEADERS["cooperative.h"],
)
PAGED_LATENT = KernelSpec(
    "paged_latent",
    ("q_latent", "q_rope", "k_pool", "v_pool", "page_tables", "tiles", "numbers", "after"),
    ("out", "fence"),
    header=HEADERS["attention.h"],
)
QMV_ROWS = KernelSpec("qmv_rows", ("rows", "weights", "scales", "biases"), ("out",))
REPLAY_DELTA = KernelSpec("replay_delta", ("q", "k", "v", "g", "beta", "state", "spans"), ("out",))
REPLAY_SSM = KernelSpec(
    "replay_ssm", ("x", "dt", "A_log", "B", "C", "D", "state", "spans"), ("out",)
)
ALL = (
    WRITE_KV_TOKENS,
    WRITE_KV_PAGES,
    QUANTISE_KV,
    ROTATE_AND_WRITE,
    COPY_PAGES,
    GATHER_PAGES,
    PAGED_DECODE,
    GROUPED_DECODE,
    DRAFT_DECODE,
    GROUPED_DRAFTS,
    MERGE_PARTITIONS,
    PAGED_PREFILL,
    COOPERATIVE_PREFILL,
    PAGED_LATENT,
    QMV_ROWS,
    REPLAY_DELTA,
    REPLAY_SSM,
)


class Kernel(Protocol):
    """A kernel to dispatch, with MLX's own arguments."""

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, int | mx.Dtype]],
        grid: Size,
        threadgroup: Size,
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]: ...


class Factory(Protocol):
    """Makes a kernel from its spec and text."""

    def __call__(self, spec: KernelSpec, source: str) -> Kernel: ...


def on_metal(spec: KernelSpec, source: str) -> Kernel:
    """Compile for the GPU through MLX, once per template and input types.

    Pools are bound by their first page.
    """
    kernel: Any = mx.fast.metal_kernel(
        name=spec.name,
        input_names=list(spec.inputs),
        output_names=list(spec.outputs),
        source=source,
        header=spec.header,
    )
    pools = [at for at, name in enumerate(spec.inputs) if name in ("k_pool", "v_pool")]

    def call(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
        for at in pools:
            inputs[at] = first_page(inputs[at])
        made: list[mx.array] = kernel(inputs=inputs, **options)
        return made

    return cast(Kernel, call) if pools else cast(Kernel, kernel)


class Dispatch:
    """A kernel with all arguments that the layers of a step share; called once per layer."""

    def __init__(
        self,
        kernel: Kernel,
        spec: KernelSpec,
        fixed: dict[str, mx.array],
        outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
        template: Template,
        grid: Size,
        threadgroup: Size,
    ) -> None:
        """fixed: inputs shared by every layer; grid in threads."""
        for name, array in fixed.items():
            assert array.size >= SMALLEST_INPUT, f"{spec.name}: {name} has {array.size} elements"
        shapes, dtypes = zip(*(outputs[name] for name in spec.outputs), strict=True)
        self._kernel = kernel
        self._inputs = [fixed.get(name) for name in spec.inputs]
        self._places = {name: at for at, name in enumerate(spec.inputs) if name not in fixed}
        self._options: dict[str, Any] = {
            "template": list(template),
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": list(shapes),
            "output_dtypes": list(dtypes),
        }

    def __call__(self, **inputs: mx.array) -> list[mx.array]:
        """Run the kernel with the remaining inputs, by name, and return its outputs."""
        assert len(inputs) == len(self._places), f"{sorted(inputs)} for {sorted(self._places)}"
        arrays = self._inputs.copy()
        for name, array in inputs.items():
            arrays[self._places[name]] = array
        return self._kernel(inputs=arrays, **self._options)  # type: ignore[arg-type]  # none is None


class Kernels:
    """The kernels of one factory, each built once, on first use."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._built: dict[str, Kernel] = {}

    def dispatch(
        self,
        spec: KernelSpec,
        fixed: dict[str, mx.array],
        outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
        template: Template,
        grid: Size,
        threadgroup: Size,
    ) -> Dispatch:
        """Bind a kernel's shared arguments; see Dispatch."""
        kernel = self._built.get(spec.name)
        if kernel is None:
            kernel = self._built[spec.name] = self._factory(spec, spec.source())
        return Dispatch(kernel, spec, fixed, outputs, template, grid, threadgroup)
