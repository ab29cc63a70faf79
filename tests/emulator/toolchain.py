"""The C compiler: finding one, and the command lines for kernels and for the runtime.

Any clang from 17 on will do (older ones lack arithmetic on __bf16), and so will the one inside the
`ziglang` wheel, which needs no other system package. The package's docstring lists the
versions it has run with.
"""

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.cache import cache_folder, digest, publish, workspace
from tests.emulator.errors import CompilerNotFound, MetalSourceError
from tests.emulator.frontend import Dialect

VARIABLE = "METAL_EMULATOR_CLANG"
MIN_CLANG = 17
_NEWEST_CLANG = 24  # the highest `clang-<n>` that is looked for

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
PRELUDE = INCLUDE / "msl" / "prelude.h"
RUNTIME = HERE / "runtime"
IS_MACOS = sys.platform == "darwin"

_ON_THIS_MACHINE = f" on {sys.platform} {platform.machine()}"  # a home folder may be shared

_PREPROCESS = (
    *("-E", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++", "-undef"),
    *("-D__METAL__=1", "-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1"),
    "-D__cpp_variable_templates=201304L",
)
_COMPILE = (
    *("-fPIC", "-fsigned-char", "-ffp-contract=off"),
    # Version 4: symbols.py reads its line tables.
    *("-gline-tables-only", "-gdwarf-4"),
    "-Wno-everything",
    *("-fno-exceptions", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables"),
    *("-fno-stack-protector", "-ferror-limit=12"),
)
_DIALECT: dict[Dialect, tuple[str, ...]] = {
    "c++": (
        *("-x", "c++", "-std=c++17", "-ffreestanding", "-nostdinc", "-nostdinc++", "-fno-rtti"),
        *("-Xclang", "-fconvergent-functions"),
        *("-Xclang", "-ffloat16-excess-precision=none"),
        *("-Xclang", "-fbfloat16-excess-precision=none"),
    ),
    "opencl": (
        *("-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc", "-cl-single-precision-constant"),
        # +all: elsewhere than on x86-64 the generic address space and half are off by default.
        "-Xclang",
        "-cl-ext=+all,-__opencl_c_pipes,-__opencl_c_device_enqueue,"
        "-__opencl_c_program_scope_global_variables,-__opencl_c_fp64,-cl_khr_fp64",
    ),
}
# What build.py makes errors of.
_WARNINGS = (
    "-Wdouble-promotion",
    "-Wimplicit-float-conversion",
    "-Wno-implicit-int-float-conversion",
)
# The instrumentation of check mode; its callbacks are in runtime/check.c.
_CHECK = (
    *("-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=thread"),
    "-fsanitize=array-bounds,alignment,shift,integer-divide-by-zero",
    *("-fsanitize-recover=all", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
    *("-mllvm", "-tsan-instrument-atomics=0"),
)
_FAST = ("-O2",)
# For counting.py: numbers stay apart, as in the lanes of a GPU, and calls of the library stay calls.
_COUNTED = (
    *("-O2", "-fno-vectorize", "-fno-slp-vectorize", "-ffp-contract=on", "-D__MSL_COUNTED"),
    "-fno-math-errno",
)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Commands that take clang's options."""

    compiler: tuple[str, ...]  # compiles kernels; needs no system headers
    linker: tuple[str, ...]  # compiles C with the system's headers, and links
    version: str  # with the machine's kind; part of every cache key

    @property
    def is_zig(self) -> bool:
        return self.compiler[-1] == "clang"

    @property
    def linker_flags(self) -> tuple[str, ...]:
        """For every use of the linker: zig builds its runtime library, in 4 s, for each other set."""
        return ("-O2", "-mcpu=baseline") if self.is_zig else ("-O2",)


def find_toolchain() -> Toolchain:
    """The compiler to use. Raises CompilerNotFound with what to install."""
    return _find(os.environ.get(VARIABLE, ""), os.environ.get("PATH", ""))


@functools.cache
def _find(choice: str, path: str) -> Toolchain:
    if choice and choice != "zig":
        chosen = _clang(choice, path)
        if chosen is None:
            raise CompilerNotFound(f"{VARIABLE}={choice} is not a clang {MIN_CLANG} or newer")
        return chosen
    if not choice:
        names = [f"clang-{n}" for n in range(_NEWEST_CLANG, MIN_CLANG - 1, -1)]
        for name in (*names, "clang"):
            if found := _clang(name, path):
                return found
    zig = _zig(path)
    if zig is None:
        raise CompilerNotFound(
            f"the Metal emulator needs a C compiler: `pip install ziglang` (or `uv sync`, which "
            f"installs the development tools), or put clang {MIN_CLANG} or newer on the PATH"
        )
    version = f"zig {_output([zig, 'version'])}{_ON_THIS_MACHINE}"
    return Toolchain((zig, "clang"), (zig, "cc", "-fno-sanitize=undefined"), version)


def _clang(name: str, path: str) -> Toolchain | None:
    program = shutil.which(name, path=path)
    if program is None:
        return None
    version = _output([program, "--version"])
    major = re.search(r"clang version (\d+)", version)
    if major is None or int(major.group(1)) < MIN_CLANG:
        return None
    return Toolchain((program,), (program,), version + _ON_THIS_MACHINE)


def _zig(path: str) -> str | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "zig")
    return shutil.which("zig", path=path)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


# ---- running it ---------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """zig keeps what it builds (its C library stubs) beside our own files."""
    folder = str(cache_folder() / "zig")
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}


def _run(command: Sequence[str], what: str, text: str | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, input=text, check=False, env=environment()
    )
    if done.returncode:
        raise MetalSourceError(f"{what} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def preprocess(
    source: str,
    include_dirs: Sequence[str],
    defines: Sequence[str],
    metal_version: int,
    behind: str = "",
) -> str:
    """The text after `#include` and `#define`, line markers kept, Metal's own headers empty.

    With a header that it is `behind`, its macros and inclusions are known, and it is no part of the text.
    """
    paths = [str(INCLUDE / "metal"), *include_dirs]
    command = [
        *find_toolchain().compiler,
        *_PREPROCESS,
        f"-D__METAL_VERSION__={metal_version}",
        *(f"-D{define}" for define in defines),
        *(option for path in paths for option in ("-I", path)),
        *(("-imacros", behind) if behind else ()),
        "-",
    ]
    return _run(command, "preprocessing", source)


def compile_flags(
    dialect: Dialect, check: bool, machine: str = platform.machine(), counted: bool = False
) -> tuple[str, ...]:
    extensions = ("-mf16c", "-mfma", "-mavx2") if machine == "x86_64" else ()
    # A frame larger than a stack must touch the guard page on its way over it.
    probes = () if IS_MACOS else ("-fstack-clash-protection",)
    warnings = ("-Werror=vla", *_WARNINGS) if dialect == "c++" else ()
    mode = _COUNTED if counted else _CHECK if check else _FAST
    return (*_DIALECT[dialect], *_COMPILE, *extensions, *probes, *warnings, *mode)


@dataclass(frozen=True, slots=True)
class CompilerResult:
    failed: bool
    diagnostics: str


class Compilation:
    """A compiler at work: started when constructed, so that two can run side by side."""

    def __init__(
        self, source: Path, flags: Sequence[str], output: Path | None, header: Path | None = None
    ) -> None:
        """Begin to compile `source` behind the prelude and a translated `header`.

        `output` None: only look for errors; a name that ends with ".ll" is written as LLVM IR.
        """
        what = ["-S", "-emit-llvm"] if output is not None and output.suffix == ".ll" else ["-c"]
        action = ["-fsyntax-only"] if output is None else [*what, "-o", str(output)]
        prelude = ["-include-pch", str(_prelude(flags, header))]
        command = [*find_toolchain().compiler, *flags, *prelude, *action, str(source)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def finish(self) -> CompilerResult:
        """Wait for it."""
        _, diagnostics = self._process.communicate()
        return CompilerResult(self._process.returncode != 0, diagnostics)


def assemble(ir: Path, output: Path) -> None:
    """LLVM IR into an object file."""
    command = [*find_toolchain().compiler, "-O1", "-fPIC", "-Wno-everything", "-c", str(ir)]
    _run([*command, "-o", str(output)], "assembling")


def _prelude(flags: Sequence[str], header: Path | None) -> Path:
    """The prelude and a header, parsed once per set of flags: that is half of the time a kernel takes."""
    toolchain = find_toolchain()
    contents = [path.read_bytes() for path in sorted(PRELUDE.parent.glob("*.h"))]
    key = digest(*contents, toolchain.version, repr((toolchain.compiler, flags, PRELUDE, header)))
    target = cache_folder() / f"{key}.pch"
    if not target.exists():
        with workspace() as folder:
            built = folder / target.name
            texts = [str(PRELUDE)] if header is None else ["-include", str(PRELUDE), str(header)]
            # The key is made of contents, so times may differ.
            emit = ("-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp", "-c")
            command = [*toolchain.compiler, *flags, *emit, "-o", str(built), *texts]
            _run(command, "compiling the prelude")
            publish(built, target)
    return target


def link(objects: Path, target: Path, folder: Path) -> None:
    """A shared library at `target` that will be moved into `folder`, beside the runtime."""
    runtime = runtime_library()
    origin = "@loader_path" if IS_MACOS else "$ORIGIN"
    toolchain = find_toolchain()
    command = [
        *toolchain.linker,
        *toolchain.linker_flags,
        *("-shared", "-o", str(target), str(objects), str(folder / runtime.name)),
        *(f"-Wl,-rpath,{origin}", "-lm"),
    ]
    _run(command, "linking")


def runtime_library() -> Path:
    """The compiled runtime, built when it is not in the cache."""
    toolchain = find_toolchain()
    sources = sorted(RUNTIME.glob("*.c"))
    flags = ["-std=c17", "-fPIC", "-shared", *toolchain.linker_flags]
    texts = [path.read_bytes() for path in (*sources, RUNTIME / "mslrt.h")]
    folder = cache_folder()
    # The loader tells libraries apart by name only; the folder makes the name of each cache its own.
    key = digest(*texts, toolchain.version, repr((toolchain.linker, flags)), str(folder))
    return _build_runtime(folder / f"libmslrt-{key}.so", toolchain, flags, sources)


def _build_runtime(
    target: Path, toolchain: Toolchain, flags: Sequence[str], sources: Sequence[Path]
) -> Path:
    if target.exists():
        return target
    name = f"-Wl,-install_name,@rpath/{target.name}" if IS_MACOS else f"-Wl,-soname,{target.name}"
    system = [] if IS_MACOS else ["-lpthread", "-ldl"]
    with workspace() as folder:
        built = folder / target.name
        command = [*toolchain.linker, *flags, "-o", str(built), *map(str, sources), name, *system]
        _run(command, "building the emulator's runtime")
        publish(built, target)
    return target
