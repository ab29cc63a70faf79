"""Finding the kernels of a Metal file: their parameters, and the names they are exported under."""

import re
from dataclasses import dataclass, field
from typing import Literal

from tests.emulator.tokens import Token, TokenList, code, depth_of

# Metal's attributes of a thread are the names of the fields of __msl_tid (include/msl/entry.h).
_FIELDS = """
    thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid
    threads_per_threadgroup threadgroups_per_grid threads_per_grid dispatch_threads_per_threadgroup
    grid_origin thread_index_in_threadgroup simdgroup_index_in_threadgroup
    thread_index_in_simdgroup simdgroups_per_threadgroup dispatch_simdgroups_per_threadgroup
    threads_per_simdgroup thread_execution_width quadgroup_index_in_threadgroup
    thread_index_in_quadgroup quadgroups_per_threadgroup dispatch_quadgroups_per_threadgroup
"""
ATTRIBUTES = {name: name for name in _FIELDS.split()} | {"grid_size": "threads_per_grid"}

_BINDING = re.compile(r"\b(buffer|threadgroup)\((\d+)\)")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel: a buffer, threadgroup memory, or an attribute of the thread."""

    kind: Literal["buffer", "threadgroup", "attribute"]
    type: str
    name: str
    index: int = 0  # of the buffer or of the threadgroup memory
    attribute: str = ""


@dataclass(frozen=True, slots=True)
class ExportedKernel:
    """A kernel function. `optional` parameters exist only when a function constant says so."""

    name: str
    parameters: tuple[Parameter, ...]
    optional: frozenset[str] = frozenset()

    def buffer_names(self) -> dict[int, str]:
        return {p.index: p.name for p in self.parameters if p.kind == "buffer"}


@dataclass(slots=True)
class Exports:
    """What one pass over the tokens found; positions are indices into those tokens."""

    kernels: dict[str, ExportedKernel] = field(default_factory=dict)
    bodies: list[tuple[int, int]] = field(default_factory=list)  # of kernels
    host_names: dict[str, str] = field(default_factory=dict)  # host_name -> C++ expression
    dropped: set[int] = field(default_factory=set)  # what a host compiler must not see

    def in_body(self, i: int) -> bool:
        return any(start < i < stop for start, stop in self.bodies)


def find_exports(tokens: TokenList) -> Exports:
    """Kernels, host names and attributes."""
    out, i = Exports(), 0
    while i < len(tokens):
        if tokens[i].text == "[[":
            i = _attribute(tokens, i, out)
        elif tokens[i].is_word and tokens[i].text == "kernel":
            out.dropped.add(i)
            _kernel(tokens, i, out)
            i += 1
        else:
            i += 1
    return out


def _attribute(tokens: TokenList, i: int, out: Exports) -> int:
    close = tokens.closing(i)
    words = {t.text for t in tokens[i:close]}
    out.dropped.update(range(i, close + 1))
    if "host_name" in words:
        return _instantiation(tokens, i, close, out)
    if "kernel" in words:
        _kernel(tokens, close, out)
    return close + 1


def _instantiation(tokens: TokenList, i: int, close: int, out: Exports) -> int:
    """`template [[host_name("n")]] [[kernel]] decltype(E) E;`, or with the parameters written out.

    Also `[[host_name("n")]] [[kernel]] void f(...) {...}`, a definition, which stays.
    """
    host_name = "".join(t.text.strip('"') for t in tokens[i:close] if t.kind == "string")
    form = tokens.find(close, "decltype", "void")
    if tokens[form].text == "decltype":
        start = tokens.after(form) + 1
        stop = tokens.closing(start - 1)
    else:
        start, stop = form + 1, tokens.find(form, "(")
    out.host_names[host_name] = tokens.text(start, stop).strip()
    template = tokens.before(i)
    if tokens.text_at(template) != "template":
        return close + 1
    end = tokens.find(form, ";")
    out.dropped.update(k for k in range(template, end + 1) if tokens[k].kind != "line")
    return end + 1


def _kernel(tokens: TokenList, i: int, out: Exports) -> None:
    """Note the kernel whose `kernel` or `[[kernel]]` ends at `i`."""
    void = tokens.find(i, "void", ";", "{")
    name = tokens.after(void)
    opening = tokens.after(name)
    if tokens[void].text != "void" or tokens.text_at(opening) != "(":
        return
    closing = tokens.closing(opening)
    body = tokens.after(closing)
    if tokens.text_at(body) == "{":
        out.bodies.append((body, tokens.closing(body)))
    optional = re.findall(r"(\w+)\s*\[\[[^\]]*function_constant", tokens.text(opening, closing))
    parameters = _parameters(tokens, opening + 1, closing)
    out.kernels[tokens[name].text] = ExportedKernel(
        tokens[name].text, parameters, frozenset(optional)
    )


def _parameters(tokens: TokenList, start: int, stop: int) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    next_buffer = 0
    for part in tokens.split(start, stop):
        parameter = _parameter(part, next_buffer)
        if parameter.kind == "buffer":
            next_buffer = max(next_buffer, parameter.index + 1)
        parameters.append(parameter)
    return tuple(parameters)


def _parameter(part: list[Token], next_buffer: int) -> Parameter:
    plain, attributes = _without_attributes(code(part))
    at = max(k for k, token in enumerate(plain) if token.is_word)
    name = plain[at].text
    type_ = " ".join(token.text for k, token in enumerate(plain) if k != at)
    binding = _BINDING.search(attributes)
    if binding:
        kind: Literal["buffer", "threadgroup"] = (
            "buffer" if binding.group(1) == "buffer" else "threadgroup"
        )
        return Parameter(kind, type_, name, int(binding.group(2)))
    known = [word for word in re.findall(r"\w+", attributes) if word in ATTRIBUTES]
    if known:
        return Parameter("attribute", type_, name, attribute=ATTRIBUTES[known[0]])
    if "*" in type_ or "&" in type_:
        return Parameter("buffer", type_, name, next_buffer)
    given = attributes or "none"
    raise part[0].error(f"kernel parameter '{name}' has no attribute Metal knows ({given})")


def _without_attributes(tokens: list[Token]) -> tuple[list[Token], str]:
    plain: list[Token] = []
    attributes: list[str] = []
    depth = 0
    for token in tokens:
        if token.text == "[[" or depth:
            depth += depth_of(token)
            attributes.append(token.text)
        else:
            plain.append(token)
    return plain, "".join(attributes)
