"""ModelFacts: what a model's files say about it, for clients that show it. Never imports mlx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mlxserve.hub.files import ModelFiles, text_config
from mlxserve.hub.gguf.sizes import kinds
from mlxserve.hub.headers import read_shapes

_SCALES, _BIASES = ".scales", ".biases"
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, read from its files.

    architecture: `model_type` of the language model
    format: "safetensors" or "gguf"
    quantisation: "int4", "mxfp4", GGUF's kind of most blocks, or a dtype in upper case
    weight_size: bytes
    """

    architecture: str = ""
    format: str = ""
    quantisation: str = ""
    num_parameters: int = 0
    weight_size: int = 0
    hidden_size: int = 0

    @classmethod
    def from_files(cls, files: ModelFiles) -> ModelFacts:
        """Read the headers of the weights. Raises UnsupportedModel."""
        config = text_config(files.config)
        return cls(
            architecture=str(config.get("model_type", "")),
            format="safetensors" if files.gguf is None else "gguf",
            quantisation=_quantisation(files, config),
            num_parameters=_num_parameters(files),
            weight_size=files.weight_size,
            hidden_size=size if isinstance(size := config.get("hidden_size"), int) else 0,
        )

    @property
    def parameters_label(self) -> str:
        """The parameter count as people write it (1.72B); empty if unknown."""
        for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
            if self.num_parameters >= size:
                return f"{self.num_parameters / size:.4g}{unit}"
        return str(self.num_parameters or "")


def _quantisation(files: ModelFiles, config: Mapping[str, Any]) -> str:
    if files.gguf is not None:
        return next(iter(kinds(files.gguf)), "")
    if isinstance(quantised := config.get("quantization"), Mapping):
        mode = quantised.get("mode", "affine")
        return str(mode) if mode != "affine" else f"int{quantised.get('bits')}"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    return _DTYPES.get(dtype, dtype.upper())


def _num_parameters(files: ModelFiles) -> int:
    if files.gguf is not None:
        return sum(prod(tensor.shape) for tensor in files.gguf.tensors.values())
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files.weights:
        shapes.update(read_shapes(file, files.name))
    return sum(_sizes(shapes, files.config.get("quantization") or {}))


def _sizes(shapes: Mapping[str, tuple[int, ...]], quantised: Mapping[str, Any]) -> Iterator[int]:
    """Yield the element count of each tensor before quantisation; a group has one scale."""
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        scales = shapes.get(module + _SCALES)
        if not quantised or scales is None:
            yield prod(shape)
        elif name.endswith(".weight"):
            own = quantised.get(module)
            group = own if isinstance(own, Mapping) else quantised
            yield prod(scales) * int(group.get("group_size", 64))
        elif not name.endswith((_SCALES, _BIASES)):
            yield prod(shape)
