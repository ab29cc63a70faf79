"""Rules that rest on reading text, because no C++ compiler has them: Metal's, and one of our own.

Ours: a product with something that grows with the pool or the batch is 64 bits wide. On the largest Macs the
keys of a layer pass 2^31 elements, and the emulator would not show an overflow: clang widens the product.
"""

from __future__ import annotations

import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"\b(\w+)\s*\([^;{}()]*\)\s*\{")
_CALLED = re.compile(r"(?<![.\w>:])(\w+)\s*\(")
_STATEMENTS = ("if", "for", "while", "switch")
_STATIC_CONSTANT = re.compile(r"static\s+(const\s+|constexpr\s+)*constant\b|static\s+constexpr\b")
THREADGROUP_VARIABLE = re.compile(
    r"(?m)^(\s*)threadgroup\s+((?:const\s+)?[\w:]+(?:<[^;<>]*>)?)\s+(\w+)\s*((?:\[[^\]]*\])+)\s*(=?)"
)
_ABSENT = {
    "double": "Metal has no double",
    "goto": "Metal has no goto",
    "try": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no run-time types",
    "typeid": "Metal has no run-time types",
    "thread_local": "Metal has no thread_local",
    "asm": "Metal has no assembly",
    "static": "Metal has no static variables outside the constant address space",
    "std": "Metal has no C++ standard library",
    "extern": "Metal has no extern",
}
# What numbers pages, slots, rows and threadgroups.
_GROWING = {"page", "tile", "slot", "row", "p", "source", "target", "sequence", "partition"}
_GROWING |= {"first_row", "first_out"}
# Lists of such numbers, short ones themselves.
_TABLES = "(?:moves|pages|tile|tiles|partitions|starts)"
_ELEMENT = re.compile(rf"\b{_TABLES}\[[^\[\]]*\]")
_WIDENED = re.compile(r"\bu?long\(")
_NARROW = re.compile(r"\b(?:u?int|u?short|u?int32_t)\s+(\w+)\s*([=,)])")  # variables, parameters
_STATEMENT_END = re.compile(r"[;{]")


def broken_rules(text: str) -> list[str]:
    """One message for each place, with its line."""
    code = _COMMENT.sub(lambda comment: "\n" * comment.group().count("\n"), text)
    return [
        *_absent_words(code),
        *_recursive_functions(code),
        *_misplaced_variables(code),
        *_narrow_products(code),
    ]


def _absent_words(code: str) -> list[str]:
    found = []
    for word, why in _ABSENT.items():
        for match in re.finditer(rf"\b{word}\b", code):
            if word != "static" or not _STATIC_CONSTANT.match(code, match.start()):
                line = code.count("\n", 0, match.start()) + 1
                found.append(f"line {line}: '{word}': {why}")
    return found


def _recursive_functions(code: str) -> list[str]:
    """Functions that call themselves, directly or through others."""
    calls: dict[str, set[str]] = {}
    for match in _FUNCTION.finditer(code):
        if match.group(1) not in _STATEMENTS:
            body = code[match.end() : _closing_brace(code, match.end())]
            calls.setdefault(match.group(1), set()).update(_CALLED.findall(body))
    return [f"'{name}' calls itself" for name in calls if name in _reached(name, calls)]


def _closing_brace(code: str, start: int) -> int:
    depth, at = 1, start
    while depth and at < len(code):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        at += 1
    return at


def _reached(name: str, calls: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(calls[name])
    while waiting:
        function = waiting.pop()
        if function not in reached:
            reached.add(function)
            waiting.extend(calls.get(function, ()))
    return reached


def _misplaced_variables(code: str) -> list[str]:
    """Threadgroup variables belong to a kernel's outermost block and have no initialiser."""
    found = []
    depth = 0
    for number, line in enumerate(code.splitlines(), 1):
        variable = THREADGROUP_VARIABLE.match(line)
        if variable and depth != 1:
            found.append(f"line {number}: threadgroup variable inside a block or a helper")
        if variable and variable.group(5):
            found.append(f"line {number}: a threadgroup variable cannot have an initialiser")
        depth += line.count("{") - line.count("}")
    return found


def _narrow_products(code: str) -> list[str]:
    """Products of 32 bits with what grows."""
    code = _without_widened(code)
    found = [
        (match.start(), "an element") for match in re.finditer(_ELEMENT.pattern + r"\)?\s*\*", code)
    ]
    code = _ELEMENT.sub(lambda element: " " * len(element[0]), code)
    for declaration in _NARROW.finditer(code):
        name = declaration[1]
        if name in _GROWING:
            factor = _factor(name).search(code, declaration.end(), _end_of_scope(code, declaration))
            if factor is not None:
                found.append((factor.start(), f"'{name}'"))
    return [
        f"line {code.count(chr(10), 0, at) + 1}: a product with {what} must be 64 bits wide"
        for at, what in sorted(found)
    ]


def _end_of_scope(code: str, declaration: re.Match[str]) -> int:
    """Of a variable the end of its block, of a parameter that of its function."""
    at = _STATEMENT_END.search(code, declaration.end())
    is_parameter = declaration[2] != "=" and at is not None and at[0] == "{"
    return _closing_brace(code, at.end() if at and is_parameter else declaration.end())


def _factor(name: str) -> re.Pattern[str]:
    """The name as a factor, alone or in a sum, or as what a function may multiply; `* name =` declares a
    pointer."""
    by = r"\s*(?:\*|<<)"
    product = rf"\b{name}\b{by}|\*\s*{name}\b(?!\s*=)|\([^()]*\b{name}\b[^()]*\){by}"
    return re.compile(rf"{product}|[(,]\s*{name}\s*[,)]")


def _without_widened(code: str) -> str:
    """The code with what is cast to 64 bits blanked, line by line the same."""
    while (match := _WIDENED.search(code)) is not None:
        depth, at = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            at += 1
        code = code[: match.start()] + "0".ljust(at - match.start()) + code[at:]
    return code
