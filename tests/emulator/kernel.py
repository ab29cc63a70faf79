"""`metal_kernel`: the emulator, with the interface of `mx.fast.metal_kernel`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.emulator.arrays import AnyArray, as_mlx, as_numpy, new_output
from tests.emulator.build import BuildRequest, build
from tests.emulator.errors import LaunchError
from tests.emulator.frontend import Dialect
from tests.emulator.launch import Binding, Program, Size, Statistics
from tests.emulator.library import METAL_VERSION, input_binding
from tests.emulator.signature import InputType, KernelBody, Template, generate

PREAMBLE = "mlx/backend/metal/kernels/utils.h"  # what MLX puts before a custom kernel
_MATH_MODES = ("safe", "relaxed", "fast")


def mlx_include_folder() -> Path:
    """The folder of MLX's own Metal headers, which its wheels carry."""
    return Path(mx.__file__).parent / "include"


class MetalKernel:
    """A kernel's body; calling it compiles (once per types and template) and runs it."""

    def __init__(
        self,
        body: KernelBody,
        *,
        ensure_row_contiguous: bool,
        writable_inputs: Sequence[str],
        partly_written: Sequence[str],
        include_dirs: Sequence[str | Path],
        check: bool,
        strict: bool,
        count: bool,
        dialect: Dialect,
        workers: int,
    ) -> None:
        self._body = body
        self._ensure_row_contiguous = ensure_row_contiguous
        self._writable = frozenset(writable_inputs)
        self._partly_written = frozenset(partly_written)
        self._include_dirs = tuple(str(Path(path).resolve()) for path in include_dirs)
        self._check = check
        self._count = count
        self._strict = strict
        self._dialect: Dialect = dialect
        self._workers = workers
        self._programs: dict[str, Program] = {}
        self.statistics: Statistics | None = None  # of the last call

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: mx.Stream | mx.Device | None = None,  # one machine, one stream
    ) -> list[mx.array]:
        """One dispatch over `grid` threads; the arguments mean what they mean to MLX.

        Runs at once and not lazily. Inputs named in `writable_inputs` are written in place.
        Raises MetalSourceError, LaunchError and KernelFault.
        """
        self._require_counts(inputs, output_shapes, output_dtypes)
        arrays = [self._input(n, x) for n, x in zip(self._body.input_names, inputs, strict=True)]
        program = self._program(arrays, output_dtypes, template or (), verbose)
        bindings = self._bind_inputs(arrays)
        filled = [
            new_output(shape, dtype, init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        first = len(bindings)
        bindings += [
            Binding(
                first + k,
                name,
                array,
                writable=True,
                starts_unwritten=init_value is None,
                partly_written=name in self._partly_written,
            )
            for k, (name, array) in enumerate(zip(self._body.output_names, filled, strict=True))
        ]
        self.statistics = program.dispatch(
            bindings, Size.of(grid, threadgroup), threadgroup_memory={}, workers=self._workers
        )
        return [as_mlx(a, dtype) for a, dtype in zip(filled, output_dtypes, strict=True)]

    def _require_counts(
        self, inputs: Sequence[object], shapes: Sequence[object], dtypes: Sequence[object]
    ) -> None:
        body = self._body
        for what, given, names in (
            ("inputs", inputs, body.input_names),
            ("output_shapes", shapes, body.output_names),
            ("output_dtypes", dtypes, body.output_names),
        ):
            if len(given) != len(names):
                raise LaunchError(
                    f"{body.name}: {what} has {len(given)} entries, the kernel has {list(names)}"
                )

    def _input(self, name: str, value: mx.array | float) -> mx.array:
        array = value if isinstance(value, mx.array) else mx.array(value)
        # A writable input is never copied: input_binding refuses what MLX would copy.
        if name in self._writable or not self._ensure_row_contiguous:
            return array
        return array if as_numpy(array).flags.c_contiguous else mx.contiguous(array)

    def _bind_inputs(self, arrays: Sequence[mx.array]) -> list[Binding]:
        bindings: list[Binding] = []
        for name, array in zip(self._body.input_names, arrays, strict=True):
            binding = input_binding(len(bindings), name, array, name in self._writable)
            bindings.append(binding)
            view = binding.array
            strides = [stride // view.itemsize for stride in view.strides]
            values: dict[str, AnyArray] = {
                "_shape": np.array(array.shape, np.int32),
                "_strides": np.array(strides, np.int64),
                "_ndim": np.array(array.ndim, np.int32),
            }
            bindings += [
                Binding(len(bindings) + k, name + suffix, values[suffix])
                for k, suffix in enumerate(self._body.metadata_of(name, array.ndim))
            ]
        return bindings

    def _program(
        self,
        arrays: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Template,
        verbose: bool,
    ) -> Program:
        body = self._body
        types = [InputType(array.dtype, array.ndim, array.size) for array in arrays]
        generated = generate(body, types, output_dtypes, template)
        if verbose:
            print(generated.listing(body))
        if generated.name in self._programs:
            return self._programs[generated.name]
        text = (
            f'# 1 "{body.name}.header"\n{body.header}\n'
            f'# 1 "{body.name}.signature"\n{generated.before}\n'
            f'# 1 "{body.name}.metal"\n{body.source}\n'
            f'# 1 "{body.name}.end"\n{generated.after}'
        )
        request = BuildRequest(
            source=text,
            preamble=PREAMBLE,
            kernel=generated.name,
            constants=(),
            include_dirs=(str(mlx_include_folder()), *self._include_dirs),
            defines=(),
            metal_version=METAL_VERSION,
            dialect=self._dialect,
            check=self._check,
            counted=self._count,
            strict=self._strict,
        )
        program = self._programs[generated.name] = Program(build(request), self._check)
        return program


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    *,
    writable_inputs: Sequence[str] = (),
    partly_written: Sequence[str] = (),
    include_dirs: Sequence[str | Path] = (),
    check: bool = False,
    strict: bool | None = None,
    count: bool = False,
    dialect: Dialect = "c++",
    workers: int = 1,
) -> MetalKernel:
    """A kernel from the body of a Metal function, as `mx.fast.metal_kernel` makes one.

    The first eight parameters are MLX's. `compile_options` may carry "math_mode", which changes
    nothing here: the host computes as "safe" says. The rest is the emulator's own:

    writable_inputs: inputs the body writes through a cast-away const; they must be row-contiguous.
    partly_written:  outputs that the body need not fill; `check` reports gaps in any others.
    include_dirs:    searched for #include, after MLX's own headers.
    check:           run with every run-time check; about twice slower.
    strict:          hold the text to both front ends and to rules.py; None: the same as `check`.
    count:           count instructions while it runs (counting.py); not together with `check`.
    dialect:         "opencl" compiles with C++ for OpenCL, which knows `f() const device`.
    workers:         threads that share the threadgroups; check mode always uses one.
    """
    if check and count:
        raise LaunchError(f"{name}: a run is checked or counted, not both")
    if unknown := set(writable_inputs) - set(input_names):
        raise LaunchError(f"{name}: writable inputs {sorted(unknown)} are not inputs")
    options = dict(compile_options or {})
    mode = options.pop("math_mode", "safe")
    if options or mode not in _MATH_MODES:
        raise LaunchError(f"{name}: compile_options takes math_mode, one of {_MATH_MODES}")
    body = KernelBody(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
    return MetalKernel(
        body,
        ensure_row_contiguous=ensure_row_contiguous,
        writable_inputs=writable_inputs,
        partly_written=partly_written,
        include_dirs=include_dirs,
        check=check,
        strict=check if strict is None else strict,
        count=count,
        dialect=dialect,
        workers=workers,
    )
