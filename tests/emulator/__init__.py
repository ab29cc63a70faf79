"""Run Metal compute kernels on a CPU, from the text a Mac would compile.

    from tests.emulator import metal_kernel

    double = metal_kernel(
        name="double",
        input_names=["x"],
        output_names=["out"],
        source="uint i = thread_position_in_grid.x; out[i] = x[i] + x[i];",
        check=True,
    )
    (out,) = double(
        inputs=[mx.arange(64, dtype=mx.float32)],
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
    )

`metal_kernel` has the interface of `mx.fast.metal_kernel` and takes the same text; `Library` takes
whole .metal files. Needs clang 17 or newer on the PATH, or `pip install ziglang`, and nothing of
mlxserve.

METAL_EMULATOR_CLANG chooses the compiler: a path, or "zig". METAL_EMULATOR_CACHE is the folder of
compiled kernels, by default `metal-emulator` in the user's cache folder. A second run compiles
nothing.

How it works
    The text is preprocessed, a few constructs are rewritten (`rewrite.py`), and stock clang
    compiles it with Metal's address spaces as real types (`include/msl`). A small runtime in C
    (`runtime`) runs every thread of a threadgroup as a fiber, with true barriers, simdgroups of 32
    lanes and 8x8 simdgroup matrices, and every buffer between unreadable pages.

`check=True` finds, while the kernel runs, and reports with line, thread and buffer:
    out-of-bounds and misaligned accesses, uninitialised threadgroup memory, data races between
    barriers (threadgroup and device memory), divergent barriers and simdgroup functions, reads of
    inactive lanes, writes to inputs, outputs left unwritten or read before they are written, too
    much threadgroup or private memory, bad shifts, division by zero.
It also compiles the text as C++ for OpenCL, whose rules are close to Metal's, and applies those of
`rules.py`.

`count=True` counts instructions instead, by what Apple's GPUs issue for them (`counting.py`). Two texts can be
compared; nothing is said about speed.

What it cannot show
  * Whether Apple's compiler accepts the text: names we declare and Metal lacks, or the reverse;
    which macOS has which feature; a compiler's own bugs. The library here was written from MLX's
    kernels and the Metal specification, and has never been compared with a Mac.
  * Speed, registers, occupancy, pipelines that allow fewer than 1,024 threads.
  * Numbers to the last bit: fused multiply-add, fast math, flushed denormals, the order inside
    simd_sum, the type half matrices accumulate in. Compare with tolerances.
  * Weak memory ordering: memory is coherent, and threadgroups run one after another (per worker).
    A kernel that spins on another threadgroup hangs here, as it may on a GPU.
  * MLX around the kernel: hazards between kernels when an input is written in place, laziness,
    donation. One dispatch is checked at a time, and a read before another thread's write of the
    same device byte is not noticed.
Not supported, and refused when compiling: textures, matrices other than simdgroup_matrix,
MetalPerformancePrimitives, structs copied between address spaces other than by
`x = *(device T*)p` and `*(threadgroup T*)p = *(device T*)q`. `dialect="opencl"` copies structs
anyhow, which MLX's complex numbers need. `uniform` is a plain number. Loops are not unrolled, also
where the text asks for it, unless instructions are counted. Stricter than Metal: every lane that has not returned must reach a
simdgroup function, at the same place.

Run on Linux x86-64 with ziglang 0.17 (clang 22) and with Debian's clang 19. For aarch64 the runtime
and a kernel (fast and check) ran under QEMU, without the Python around them. For macOS both were
compiled and linked with zig, and never run.
"""

from tests.emulator.errors import (
    CacheNotUsable,
    CompilerNotFound,
    EmulatorError,
    LaunchError,
    MetalSourceError,
)
from tests.emulator.faults import Fault, FaultKind, KernelFault, SourceLine
from tests.emulator.kernel import MetalKernel, metal_kernel
from tests.emulator.launch import Statistics
from tests.emulator.library import Library, LibraryFunction, OutputBuffer

__all__ = [
    "CacheNotUsable",
    "CompilerNotFound",
    "EmulatorError",
    "Fault",
    "FaultKind",
    "KernelFault",
    "LaunchError",
    "Library",
    "LibraryFunction",
    "MetalKernel",
    "MetalSourceError",
    "OutputBuffer",
    "SourceLine",
    "Statistics",
    "metal_kernel",
]
