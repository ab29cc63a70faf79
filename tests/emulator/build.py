"""One kernel from text to a loadable library, remembered.

A record in the cache says, for a request, which library answers it and which included files it was
made from. When those still have the same content nothing is run, not even the preprocessor.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.emulator.cache import cache_folder, digest, publish, publish_text, workspace
from tests.emulator.counting import counted
from tests.emulator.errors import MetalSourceError
from tests.emulator.exports import ExportedKernel, Parameter
from tests.emulator.frontend import Dialect, Translation, translate, translate_header
from tests.emulator.toolchain import (
    HERE,
    INCLUDE,
    IS_MACOS,
    Compilation,
    assemble,
    compile_flags,
    find_toolchain,
    link,
    preprocess,
    runtime_library,
)

_INCLUDED = re.compile(r'^# \d+ "(/[^"]+)"', re.M)
_UNROLL = re.compile(r"^[ \t]*#pragma clang loop unroll\(full\)", re.M)
_DIAGNOSTIC = re.compile(r": (?:fatal )?(error|warning|note): ")
_TO_BFLOAT = re.compile(r"to '[^']*(?:bfloat|__bf16)")


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to compile, and how."""

    source: str
    preamble: str  # the name of a header that MLX puts before the source; "" if none
    kernel: str  # host_name, function, or an expression such as `k<float, 64>`
    constants: tuple[tuple[int | str, bool | int | float], ...]
    include_dirs: tuple[str, ...]
    defines: tuple[str, ...]
    metal_version: int
    dialect: Dialect
    check: bool  # run-time checks compiled in
    counted: bool  # instead: every block tells the runtime its instructions
    strict: bool  # the text must also pass the second front end and the rules of rules.py


@dataclass(frozen=True, slots=True)
class Built:
    library: Path
    kernel: ExportedKernel


def build(request: BuildRequest) -> Built:
    """The library for this request. Raises MetalSourceError, CompilerNotFound, CacheNotUsable."""
    folder = cache_folder()
    runtime = runtime_library()
    key = digest(repr(request), find_toolchain().version, _own_files(), runtime.name)
    record = folder / f"{key}.json"
    return _remembered(record, folder) or _build(request, key, record, folder)


@functools.cache
def _own_files() -> str:
    """A name for this version of the emulator: what a library is made from, not the tests."""
    files = [*HERE.glob("*.py"), *(p for p in INCLUDE.rglob("*") if p.is_file())]
    return digest(*(p.read_bytes() for p in sorted(files)))


def _remembered(record: Path, folder: Path) -> Built | None:
    if not record.exists():
        return None
    stored = json.loads(record.read_text())
    if not _are_unchanged(stored["dependencies"]):
        return None
    library = folder / stored["library"]
    return Built(library, _kernel_from_json(stored["kernel"])) if library.exists() else None


def _build(request: BuildRequest, key: str, record: Path, folder: Path) -> Built:
    preamble = None if request.strict or not request.preamble else _preamble(request)
    text = _preprocessed(request, behind="" if preamble is None else request.preamble)
    dependencies = _dependencies(text) | ({} if preamble is None else preamble.dependencies)
    translation = translate(
        text,
        request.kernel,
        dict(request.constants),
        request.dialect,
        lint=request.strict,
        names_before=frozenset() if preamble is None else preamble.names,
    )
    library = folder / f"{digest(key, repr(dependencies))}.so"
    with workspace() as work:
        header = None if preamble is None else preamble.header
        _compile(request, text, translation, work, header)
        object_file = work / "kernel.o"
        if IS_MACOS:  # the library's debug map names the object, so it has to stay
            publish(object_file, library.with_suffix(".o"))
            object_file = library.with_suffix(".o")
        link(object_file, work / "kernel.so", folder)
        publish(work / "kernel.so", library)
        stored = {
            "library": library.name,
            "dependencies": dependencies,
            "kernel": _kernel_to_json(translation.kernel),
        }
        (work / "record.json").write_text(json.dumps(stored))
        publish(work / "record.json", record)
    return Built(library, translation.kernel)


def _preprocessed(request: BuildRequest, behind: str = "") -> str:
    """The source behind its preamble, which is part of the text unless it is read from a header."""
    source = request.source
    if request.preamble and not behind:
        source = f'#include "{request.preamble}"\n{source}'
    options = request.include_dirs, request.defines, request.metal_version
    return preprocess(source, *options, behind)


def _are_unchanged(dependencies: Mapping[str, str]) -> bool:
    return all(
        Path(path).is_file() and digest(Path(path).read_bytes()) == content
        for path, content in dependencies.items()
    )


def _dependencies(text: str) -> dict[str, str]:
    """What a preprocessed text was made from, and digests of it."""
    return {
        path: digest(Path(path).read_bytes())
        for path in sorted(set(_INCLUDED.findall(text)))
        if not Path(path).is_relative_to(INCLUDE)
    }


@dataclass(frozen=True, slots=True)
class _Preamble:
    header: Path  # translated
    names: frozenset[str]
    dependencies: dict[str, str]


_preambles: dict[tuple[object, ...], _Preamble] = {}


def _preamble(request: BuildRequest) -> _Preamble:
    """The request's preamble, translated: five sixths of a kernel's text, the same for all of them."""
    folder = cache_folder()
    options = request.include_dirs, request.defines, request.metal_version
    key = folder, request.preamble, options, request.dialect
    if key in _preambles and _are_unchanged(_preambles[key].dependencies):
        return _preambles[key]
    text = preprocess(f'#include "{request.preamble}"\n', *options)
    translation = translate_header(text, request.dialect)
    header = folder / f"preamble-{digest(translation.text, request.dialect)}.h"
    if not header.exists():
        publish_text(translation.text, header)
    _preambles[key] = _Preamble(header, translation.names, _dependencies(text))
    return _preambles[key]


def _compile(
    request: BuildRequest, text: str, translation: Translation, work: Path, header: Path | None
) -> None:
    """Into work/kernel.o, with the second front end working beside it when it is asked.

    Loops stay loops, which compile in a tenth of the time (paged_prefill of dimension 256 with checks:
    0.3 s of CPU instead of 8). The second front end reads the pragmas.
    """
    if request.strict and (warnings := _own_warnings(request, translation)):
        raise MetalSourceError("\n".join(warnings))
    source = work / "kernel.cpp"
    source.write_text(translation.text if request.counted else _UNROLL.sub("", translation.text))
    flags = compile_flags(request.dialect, request.check, counted=request.counted)
    output = work / ("kernel.ll" if request.counted else "kernel.o")
    compilations = [Compilation(source, flags, output, header)]
    if request.strict and request.dialect == "c++":
        other = translate(text, request.kernel, dict(request.constants), "opencl", lint=False)
        source = work / "kernel.clcpp"
        source.write_text(other.text)
        compilations.append(Compilation(source, compile_flags("opencl", check=False), None))
    outcomes = [compilation.finish() for compilation in compilations]
    for outcome in outcomes:
        if outcome.failed:
            errors = _without_warnings(outcome.diagnostics)
            raise MetalSourceError(f"the Metal source does not compile:\n{errors}")
    _refuse_conversions(outcomes[0].diagnostics)
    if request.counted:
        output.write_text(counted(output.read_text()))
        assemble(output, work / "kernel.o")


def _without_warnings(diagnostics: str) -> str:
    """Errors and the notes about them; a note goes with what it follows."""
    kept: list[str] = []
    keep = True
    for line in diagnostics.splitlines():
        kind = _DIAGNOSTIC.search(line)
        if kind and kind.group(1) != "note":
            keep = kind.group(1) != "warning"
        if keep and not line.startswith("In file included from"):
            kept.append(line)
    return "\n".join(kept)


def _own_warnings(request: BuildRequest, translation: Translation) -> list[str]:
    """Those about the kernel itself, not about the libraries it includes."""
    return [w for w in translation.warnings if not w.startswith(request.include_dirs)]


def _refuse_conversions(diagnostics: str) -> None:
    """Conversions that clang only warns of and Metal refuses."""
    lines = diagnostics.splitlines()
    doubles = [s for s in lines if "Wdouble-promotion" in s and "to 'double'" in s]
    if doubles:
        raise MetalSourceError("double arithmetic (Metal has no double):\n" + "\n".join(doubles))
    # float to half narrows implicitly in Metal, float to bfloat does not
    narrowed = [s for s in lines if "Wimplicit-float-conversion" in s and _TO_BFLOAT.search(s)]
    if narrowed:
        message = "implicit conversion to bfloat (an error in Metal):\n" + "\n".join(narrowed)
        raise MetalSourceError(message)


def _kernel_to_json(kernel: ExportedKernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "parameters": [asdict(parameter) for parameter in kernel.parameters],
        "optional": sorted(kernel.optional),
    }


def _kernel_from_json(stored: Mapping[str, Any]) -> ExportedKernel:
    parameters = tuple(Parameter(**parameter) for parameter in stored["parameters"])
    return ExportedKernel(stored["name"], parameters, frozenset(stored["optional"]))
