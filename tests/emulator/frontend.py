"""From preprocessed Metal text to the text clang compiles, with the kernels it exports."""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.emulator.declarations import (
    construct_constants,
    drop_qualified_members,
    drop_thread_members,
    point_array_parameters,
    qualify_constants,
)
from tests.emulator.errors import MetalSourceError
from tests.emulator.exports import ExportedKernel, Parameter, find_exports
from tests.emulator.rewrite import Constants, Rewriter, vector_names
from tests.emulator.rules import (
    recursive_functions,
    refuse_absent_words,
    unqualified_pointers,
)
from tests.emulator.tokens import TokenList

# "c++" checks address spaces as types; "opencl" (C++ for OpenCL) checks the language's other rules,
# and knows address-space qualified member functions.
Dialect: TypeAlias = Literal["c++", "opencl"]

_FIRST_THREADGROUP_ARGUMENT = 32  # their places in the argument table, after the buffers


@dataclass(frozen=True, slots=True)
class Translation:
    """One kernel of a file, ready to compile. `warnings` are what Metal would refuse."""

    text: str
    kernel: ExportedKernel
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeaderTranslation:
    """A header, ready to compile. Of `names` a text behind it may construct vectors."""

    text: str
    names: frozenset[str]


def translate(
    preprocessed: str,
    name: str,
    constants: Constants,
    dialect: Dialect,
    *,
    lint: bool,
    names_before: frozenset[str] = frozenset(),
) -> Translation:
    """Translate a whole file and add an entry point for the kernel called `name`.

    `name` is a host_name of the file, a kernel's name, or an expression such as `k<float, 64>`.
    `names_before` are those of a header before it. With `lint` the rules that rest on reading tokens
    are checked as well.
    """
    tokens, names = _spelled_for(dialect, preprocessed)
    names |= names_before
    warnings = unqualified_pointers(tokens, names) + recursive_functions(tokens) if lint else []
    exports = find_exports(tokens)
    expression = exports.host_names.get(name, name)
    kernel = exports.kernels.get(_function_of(expression))
    if kernel is None:
        known = sorted(exports.host_names) or sorted(exports.kernels)
        raise MetalSourceError(f"no kernel '{name}'; the source has: {', '.join(known[:20])}")
    rewriter = Rewriter(tokens, names, exports, constants)
    text = rewriter.text() + entry_point(kernel, expression)
    return Translation(text, kernel, tuple(warnings + rewriter.warnings))


def translate_header(preprocessed: str, dialect: Dialect) -> HeaderTranslation:
    """Translate a header without kernels, which texts behind it need not contain."""
    tokens, names = _spelled_for(dialect, preprocessed)
    text = Rewriter(tokens, names, find_exports(tokens), {}).text()
    return HeaderTranslation(text, names)


def _spelled_for(dialect: Dialect, preprocessed: str) -> tuple[TokenList, frozenset[str]]:
    """Declarations as a dialect spells them, and the names that may construct a vector."""
    tokens = TokenList.of(preprocessed)
    names = vector_names(tokens)
    refuse_absent_words(tokens)
    point_array_parameters(tokens)
    if dialect == "opencl":
        drop_thread_members(tokens)
        qualify_constants(tokens)
    else:
        drop_qualified_members(tokens)
        construct_constants(tokens)
    return tokens, names


def _function_of(expression: str) -> str:
    match = re.match(r"[\w:]+", expression)
    return match.group().split("::")[-1] if match else ""


def entry_point(kernel: ExportedKernel, expression: str) -> str:
    """The C function the runtime calls for every thread."""
    arguments = ", ".join(_argument(parameter) for parameter in kernel.parameters)
    return (
        '\n# 1 "entry point"\nextern "C" __attribute__((no_sanitize("thread"))) '
        "void __msl_entry(thread ulong* a, const thread __msl_tid* t) {\n"
        f"  {expression}({arguments});\n"
        "}\n"
    )


def _argument(parameter: Parameter) -> str:
    if parameter.kind == "buffer":
        return f"__msl_arg{{a[{parameter.index}]}}"
    if parameter.kind == "threadgroup":
        return f"__msl_arg{{a[{_FIRST_THREADGROUP_ARGUMENT + parameter.index}]}}"
    type_ = re.sub(r"\bconst\b", "", parameter.type).strip()
    return f"__msl_id<{type_}>(t->{parameter.attribute})"
