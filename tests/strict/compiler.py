"""clang as a reader of Metal: the text as C++14 and as C++ for OpenCL, behind MLX's own preamble.

types     C++14, which is what Metal before version 4 is. Address spaces are type qualifiers that
          nothing converts between, and a pointer without one is `thread`. Compiled to LLVM IR, which
          tells threadgroup memory and the arrays that did not become registers.
language  C++ for OpenCL, on the text with its template arguments as macros (a kernel there is no
          template): scopes of variables, no double, no function pointers, no mutable globals.
"""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tests.emulator.cache import cache_folder, digest, publish, workspace
from tests.emulator.declarations import (
    drop_qualified_members,
    drop_thread_members,
    point_array_parameters,
)
from tests.emulator.kernel import mlx_include_folder
from tests.emulator.library import METAL_VERSION
from tests.emulator.tokens import TokenList
from tests.emulator.toolchain import environment, find_toolchain, preprocess
from tests.strict.rules import THREADGROUP_VARIABLE

Pass: TypeAlias = Literal["types", "language"]

INCLUDE = Path(__file__).parent / "include"
_PREAMBLE = "mlx/backend/metal/kernels/utils.h"  # what MLX puts before a custom kernel

_NARROWING = (
    *("-Werror=implicit-float-conversion", "-Wno-implicit-int-float-conversion"),
    *("-Werror=double-promotion", "-Werror=shorten-64-to-32", "-Werror=return-type"),
)
_COMMON = ("-target", "x86_64-linux-gnu", "-ferror-limit=20", "-Wno-everything", *_NARROWING)
_FLAGS: dict[Pass, tuple[str, ...]] = {
    "types": (
        *("-x", "c++", "-std=c++14", "-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti"),
        *("-fno-threadsafe-statics", "-O2", "-fno-math-errno", "-ffp-contract=fast"),
        *_COMMON,
        *("-Werror=vla", "-Werror=vla-extension", "-Werror=vla-cxx-extension"),
        *("-Werror=c++17-extensions", "-Werror=c++20-extensions", "-Werror=c++23-extensions"),
        *("-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=shadow"),
        *("-Werror=array-bounds", "-Werror=incompatible-pointer-types"),
    ),
    "language": (
        *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", *_COMMON, "-Xclang"),
        "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,-__opencl_c_fp64,-cl_khr_fp64,"
        "-__opencl_c_program_scope_global_variables,-__opencl_c_pipes,-__opencl_c_device_enqueue",
    ),
}
_ACTION: dict[Pass, tuple[str, ...]] = {
    "types": ("-S", "-emit-llvm", "-o", "-"),
    "language": ("-fsyntax-only",),
}

_ATTRIBUTE = re.compile(r"\[\[[^\[\]]*\]\]")
_LINE_MARKER = re.compile(r"(?m)^# \d+ .*$")
_VECTOR_NAME = re.compile(
    r"typedef\s+(?:metal::)?vec<[^;]*>\s+(\w+);|using\s+(\w+)\s*=\s*(?:metal::)?vec<"
)
_SCALARS = [
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "float",
    "bfloat",
]
_VECTORS = [f"{scalar}{size}" for scalar in _SCALARS for size in (2, 3, 4)]
_INSTANTIATION = re.compile(
    r'template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\] decltype\(\w+<(.*)>\) \w+<.*>;'
)
_TEMPLATE = re.compile(r"template <([^>]*)>\n(?=\[\[kernel\]\] void)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass says of a text; `ir` is empty for the language pass."""

    errors: tuple[str, ...]
    ir: str


def compile_text(text: str, which: Pass) -> Outcome:
    prepared = types_text(text) if which == "types" else language_text(text)
    command = [
        *find_toolchain().compiler,
        *_FLAGS[which],
        *("-I", str(INCLUDE), "-include-pch", str(preamble(which)), *_ACTION[which], "-"),
    ]
    done = subprocess.run(
        command, input=prepared, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode == 0:
        return Outcome((), done.stdout)
    if "PCH" in done.stderr or "precompiled" in done.stderr:  # which is no fault of the text
        raise RuntimeError(f"a file of {cache_folder()} is not usable: {done.stderr.strip()}")
    errors = tuple(line for line in done.stderr.splitlines() if "error" in line)
    return Outcome(errors or (done.stderr.strip(),), "")


def types_text(text: str) -> str:
    """Metal to C++14: attributes go, and threadgroup variables become static."""
    variables = THREADGROUP_VARIABLE.sub(
        lambda m: f"{m[1]}static __attribute__((used)) threadgroup {m[2]} {m[3]}{m[4]} {m[5]}", text
    )
    return _vector_calls(text) + _numbered(_ATTRIBUTE.sub("", variables))


def language_text(text: str) -> str:
    """Metal to C++ for OpenCL: the parameters of the kernel's template become macros, which a header before it
    does not see."""
    instantiation, template = _INSTANTIATION.search(text), _TEMPLATE.search(text)
    if instantiation and template:
        names = [parameter.split()[-1] for parameter in template[1].split(",")]
        values = [value.strip() for value in instantiation[1].split(",")]
        pairs = zip(names, values, strict=True)
        macros = "".join(f"#define {name} {value}\n" for name, value in pairs)
        line = text.count("\n", 0, template.end()) + 1
        text = text.replace(template[0], f'{macros}#line {line} "kernel"\n')
        text = text.replace(instantiation[0], "")
    kernels = text.replace("[[kernel]] void", "__kernel void")
    return _vector_calls(text) + _numbered(_ATTRIBUTE.sub("", kernels))


def _vector_calls(text: str) -> str:
    """`float4(a, b.xy, 1)` constructs a vector; C++ spells no such call, so it is a macro."""
    aliases = [first or second for first, second in _VECTOR_NAME.findall(text)]
    names = dict.fromkeys([*_VECTORS, *aliases])
    return "".join(f"#define {name}(...) __make<{name}>(__VA_ARGS__)\n" for name in names)


def _numbered(text: str) -> str:
    return f'#line 1 "kernel"\n{text}'


@functools.cache
def preamble(which: Pass) -> Path:
    """Our declarations and MLX's preamble, parsed once for a checkout, whose files the compiled form names."""
    text = _mlx_preamble(which)
    own = [path.read_bytes() for path in sorted(INCLUDE.rglob("*.h"))]
    toolchain = find_toolchain()
    key = digest(text, *own, repr((toolchain.compiler, toolchain.version, _FLAGS[which], INCLUDE)))
    target = cache_folder() / f"strict-{which}-{key}.pch"
    if not target.exists():
        # The compiled form names both files. A pragma of a main file is ignored, hence the second.
        header = _publish(target.with_suffix(".preamble.h"), text)
        main = _publish(target.with_suffix(".h"), f'#include "{header}"\n')
        with workspace() as folder:
            emit(which, main, folder / target.name)
            publish(folder / target.name, target)
    return target


def _publish(target: Path, text: str) -> Path:
    with workspace() as folder:
        (folder / target.name).write_text(text)
        publish(folder / target.name, target)
    return target


def emit(which: Pass, header: Path, target: Path) -> None:
    command = [
        *find_toolchain().compiler,
        *_FLAGS[which],
        *("-I", str(INCLUDE), "-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp"),
        *("-c", "-o", str(target), str(header)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, f"MLX's preamble does not compile:\n{done.stderr}"


@functools.cache
def _mlx_preamble(which: Pass) -> str:
    """The headers of the installed wheel, spelled for a dialect, with no warnings asked for."""
    text = preprocess(f'#include "{_PREAMBLE}"\n', [str(mlx_include_folder())], [], METAL_VERSION)
    tokens = TokenList.of(text)
    point_array_parameters(tokens)
    if which == "types":
        drop_qualified_members(tokens)  # C++ has no members in address spaces
    else:
        drop_thread_members(tokens)
    own = '#pragma clang system_header\n#include "inside.h"\nusing namespace metal;\n'
    return own + _LINE_MARKER.sub("", tokens.joined())


def front_end_version() -> str:
    """Changes with everything that a report depends on, apart from the text."""
    own = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return digest(*own, str(preamble("types")), str(preamble("language")))
