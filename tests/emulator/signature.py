"""The text around a kernel's body, as `mx.fast.metal_kernel` writes it.

Byte for byte what MLX 0.32 writes, apart from the line markers that make messages count lines from
the start of the header and of the body.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from tests.emulator.arrays import dtype_name

TemplateValue: TypeAlias = bool | int | mx.Dtype
Template: TypeAlias = Sequence[tuple[str, TemplateValue]]

SMALL = 8  # an input with fewer elements arrives in the constant address space

_METAL_TYPES = {
    **{name: f"{name}_t" for name in ("uint8", "uint16", "uint32", "uint64")},
    **{name: f"{name}_t" for name in ("int8", "int16", "int32", "int64")},
    **{name: f"{name}_t" for name in ("float16", "bfloat16", "complex64")},
    "float32": "float",
    "bool": "bool",
}

# In MLX's order. A body gets those whose names occur in it.
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Metadata of an input a body may name: suffix -> type.
METADATA = {"_shape": "int*", "_strides": "int64_t*", "_ndim": "int&"}


@dataclass(frozen=True, slots=True)
class KernelBody:
    """What the author of a kernel wrote."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    atomic_outputs: bool

    def metadata_of(self, name: str, num_dims: int) -> tuple[str, ...]:
        """Which suffixes of an input the body names; a scalar has none."""
        return tuple(s for s in METADATA if num_dims > 0 and name + s in self.source)


@dataclass(frozen=True, slots=True)
class InputType:
    """All that the signature depends on."""

    dtype: mx.Dtype
    num_dims: int
    size: int

    @property
    def metal(self) -> str:
        return _METAL_TYPES[dtype_name(self.dtype)]

    @property
    def name_part(self) -> str:
        if self.num_dims == 0:
            return f"{self.metal}s"
        return f"{self.metal}c" if self.size < SMALL else self.metal


@dataclass(frozen=True, slots=True)
class Generated:
    """The text before and after a body."""

    name: str  # the kernel's exported name
    before: str
    after: str

    def listing(self, body: KernelBody) -> str:
        """What MLX prints when a call is verbose."""
        source = f"{body.header}{self.before}{body.source}{self.after}"
        return f"Generated source code for `{body.name}`:\n```\n{source}\n```"


def generate(
    body: KernelBody,
    inputs: Sequence[InputType],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
) -> Generated:
    """The text around the body, for these types."""
    values = [_template_value(value) for _, value in template]
    name = _name(body, inputs, output_dtypes, values)
    parameters = ",\n".join([*_buffers(body, inputs, output_dtypes), *_attributes(body.source)])
    before = f"{_template_line(template)}[[kernel]] void {name}(\n{parameters}) {{\n"
    after = "\n}\n"
    if template:
        instance = f"{name}<{', '.join(values)}>"
        after += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Generated(name, before, after)


def _template_value(value: TemplateValue) -> str:
    return str(int(value)) if isinstance(value, int) else _METAL_TYPES[dtype_name(value)]


def _template_kind(value: TemplateValue) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _template_line(template: Template) -> str:
    if not template:
        return ""
    parameters = ", ".join(f"{_template_kind(value)} {name}" for name, value in template)
    return f"template <{parameters}>\n"


def _name(
    body: KernelBody,
    inputs: Sequence[InputType],
    output_dtypes: Sequence[mx.Dtype],
    values: Sequence[str],
) -> str:
    template = re.sub(r"\W", "_", "__" + "_".join(values)) if values else ""
    types = [type_.name_part for type_ in inputs]
    types += [_METAL_TYPES[dtype_name(dtype)] for dtype in output_dtypes]
    return f"custom_kernel_{body.name}{template}" + "".join(f"_{part}" for part in types)


def _buffers(
    body: KernelBody, inputs: Sequence[InputType], output_dtypes: Sequence[mx.Dtype]
) -> list[str]:
    declared: list[str] = []
    for name, type_ in zip(body.input_names, inputs, strict=True):
        space = "constant" if type_.size < SMALL else "device"
        mark = "&" if type_.num_dims == 0 else "*"
        declared.append(f"const {space} {type_.metal}{mark} {name}")
        declared += [
            f"const constant {METADATA[suffix]} {name}{suffix}"
            for suffix in body.metadata_of(name, type_.num_dims)
        ]
    for name, dtype in zip(body.output_names, output_dtypes, strict=True):
        metal = _METAL_TYPES[dtype_name(dtype)]
        declared.append(f"device {f'atomic<{metal}>' if body.atomic_outputs else metal}* {name}")
    return [f"  {text} [[buffer({index})]]" for index, text in enumerate(declared)]


def _attributes(source: str) -> list[str]:
    return [f"  {type_} {name} [[{name}]]" for name, type_ in _ATTRIBUTES.items() if name in source]
