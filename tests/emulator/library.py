"""Whole .metal files: `Library(source).function(name)` compiles one kernel and can run it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from tests.emulator.arrays import AnyArray, as_mlx, as_numpy, new_output
from tests.emulator.build import BuildRequest, build
from tests.emulator.errors import LaunchError
from tests.emulator.frontend import Dialect
from tests.emulator.launch import Binding, Program, Size, Statistics

Value: TypeAlias = bool | int | float
Constants: TypeAlias = Mapping[int, Value] | Mapping[str, Value] | Mapping[int | str, Value]

METAL_VERSION = 320  # __METAL_VERSION__: Metal 3.2, macOS 15


@dataclass(frozen=True, slots=True)
class OutputBuffer:
    """An array the kernel fills; without `init_value` every byte of it must be written."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    init_value: float | None = None


class LibraryFunction:
    """A kernel of a library; calling it is one dispatch."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.statistics: Statistics | None = None  # of the last call

    @property
    def name(self) -> str:
        return self._program.kernel.name

    def __call__(
        self,
        inputs: Mapping[int, mx.array | AnyArray],
        outputs: Mapping[int, OutputBuffer],
        *,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        writable: Collection[int] = (),
        threadgroup_memory: Mapping[int, int] | None = None,
        workers: int = 1,
    ) -> dict[int, mx.array]:
        """Run the kernel over `grid` threads, in threadgroups of `threadgroup` threads.

        `inputs` and `outputs` are keyed by buffer index. A numpy array is passed as it lies in
        memory, so a structured one serves for a `constant` struct. Inputs named in `writable` are
        written in place. `threadgroup_memory` gives the bytes of [[threadgroup(n)]] parameters.
        Returns the outputs by index. Raises LaunchError and KernelFault.
        """
        if both := inputs.keys() & outputs.keys():
            raise LaunchError(f"buffers {sorted(both)} are both inputs and outputs")
        if unknown := set(writable) - inputs.keys():
            raise LaunchError(f"writable buffers {sorted(unknown)} are not inputs")
        names = self._program.kernel.buffer_names()
        bindings = [
            input_binding(index, names.get(index, f"buffer {index}"), value, index in writable)
            for index, value in inputs.items()
        ]
        filled = {
            index: new_output(output.shape, output.dtype, output.init_value)
            for index, output in outputs.items()
        }
        bindings += [
            Binding(
                index,
                names.get(index, f"buffer {index}"),
                filled[index],
                writable=True,
                starts_unwritten=outputs[index].init_value is None,
            )
            for index in outputs
        ]
        self.statistics = self._program.dispatch(
            bindings,
            Size.of(grid, threadgroup),
            threadgroup_memory=threadgroup_memory or {},
            workers=workers,
        )
        return {index: as_mlx(filled[index], output.dtype) for index, output in outputs.items()}


def input_binding(index: int, name: str, value: mx.array | AnyArray, writable: bool) -> Binding:
    """A buffer the kernel reads, or, when `writable`, updates in place."""
    array = as_numpy(value) if isinstance(value, mx.array) else np.asarray(value)
    if writable and not array.flags.c_contiguous:
        raise LaunchError(
            f"'{name}' is written in place but is not row-contiguous: MLX would hand the kernel "
            "a copy, and the writes would be lost"
        )
    return Binding(index, name, array, writable)


class Library:
    """The text of a .metal file; each kernel is compiled when it is asked for.

    `name` is what messages call the text. `include_dirs` are searched for #include, `defines` are
    `NAME=value`. With `check` the kernels run with every run-time check. With `strict` (None: the
    same as `check`) the text must also pass the second front end, which knows the language's rules
    better and refuses references that classes return to their members. `dialect="opencl"` compiles
    with that front end only: it knows `f() const device`, and is weaker on address spaces.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "library.metal",
        include_dirs: Sequence[str | Path] = (),
        defines: Sequence[str] = (),
        check: bool = False,
        strict: bool | None = None,
        dialect: Dialect = "c++",
        metal_version: int = METAL_VERSION,
    ) -> None:
        self._source = f'# 1 "{name}"\n{source}'
        self._include_dirs = tuple(str(Path(path).resolve()) for path in include_dirs)
        self._defines = tuple(defines)
        self._check = check
        self._strict = check if strict is None else strict
        self._dialect: Dialect = dialect
        self._metal_version = metal_version

    def function(self, name: str, constants: Constants | None = None) -> LibraryFunction:
        """The kernel called `name`: a host_name, a function, or `function<template, arguments>`.

        `constants` are function constants by index or by name; those left out are zero.
        Raises MetalSourceError, CompilerNotFound and CacheNotUsable.
        """
        request = BuildRequest(
            source=self._source,
            preamble="",
            kernel=name,
            constants=tuple((constants or {}).items()),
            include_dirs=self._include_dirs,
            defines=self._defines,
            metal_version=self._metal_version,
            dialect=self._dialect,
            counted=False,
            check=self._check,
            strict=self._strict,
        )
        return LibraryFunction(Program(build(request), self._check))
