"""One text's report, remembered: the same text, compiler and headers are not read twice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tests.emulator.cache import cache_folder, digest, publish, workspace
from tests.strict.compiler import compile_text, front_end_version
from tests.strict.rules import broken_rules
from tests.strict.texts import KernelText

MAX_THREADGROUP_BYTES = 32 << 10
_MAX_WORKERS = 4

_THREADGROUP_VARIABLE = re.compile(r"addrspace\(3\) global (.*?),")
_IN_MEMORY = re.compile(r"= alloca ([^\n]+?), align")
_SEQUENCE = re.compile(r"[\[<](\d+) x (.*)[\]>]$")
_INITIAL = re.compile(r" (zeroinitializer|undef|poison)$")
_BYTES = {"float": 4, "half": 2, "bfloat": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1}


@dataclass(frozen=True, slots=True)
class Report:
    errors: tuple[str, ...]
    threadgroup_bytes: int
    in_memory: tuple[str, ...]  # LLVM types of private variables that are not in registers

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is wrong with the text."""
        found = list(self.errors)
        if self.threadgroup_bytes > MAX_THREADGROUP_BYTES:
            found.append(f"{self.threadgroup_bytes} bytes of threadgroup memory")
        found += [f"a private array stays in memory: {type_}" for type_ in self.in_memory]
        return tuple(found)


def check(text: str) -> Report:
    """The rules, then both passes of the compiler."""
    path = cache_folder() / f"strict-{digest(text, front_end_version())}.json"
    if path.exists():
        stored = json.loads(path.read_text())
        return Report(
            tuple(stored["errors"]), stored["threadgroup_bytes"], tuple(stored["in_memory"])
        )
    report = _read(text)
    with workspace() as folder:
        (folder / "report.json").write_text(json.dumps(asdict(report)))
        publish(folder / "report.json", path)
    return report


def check_all(texts: Sequence[KernelText]) -> dict[KernelText, Report]:
    """Reports of many texts, a few compilers side by side."""
    with ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1)) as pool:
        reports = pool.map(check, [text.text for text in texts])
        return dict(zip(texts, reports, strict=True))


def _read(text: str) -> Report:
    types = compile_text(text, "types")
    language = compile_text(text, "language")
    errors = [f"rule: {message}" for message in broken_rules(text)]
    errors += [f"types: {message}" for message in types.errors]
    errors += [f"language: {message}" for message in language.errors]
    variables = _THREADGROUP_VARIABLE.findall(types.ir)
    size = sum(_size_of(_INITIAL.sub("", variable)) for variable in variables)
    return Report(tuple(errors), size, tuple(_IN_MEMORY.findall(types.ir)))


def _size_of(ir_type: str) -> int:
    """Bytes of an LLVM type; a vector of three takes the place of four."""
    sequence = _SEQUENCE.match(ir_type)
    if sequence is None:
        return _BYTES[ir_type]
    count = int(sequence[1])
    if ir_type.startswith("<") and count == 3:
        count = 4
    return count * _size_of(sequence[2])
