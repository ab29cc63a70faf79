"""The regular expressions of the product, and the texts on which one may take more than linear time.

An expression is what the source passes to a function of `re`, or as `pattern=` to pydantic. Its value is computed
in its module; `LOCALS` has examples of the variables of functions.
"""

from __future__ import annotations

import ast
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import permutations, product
from operator import mod
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any, TypeAlias
from unittest.mock import patch

from pydantic import Field, TypeAdapter, ValidationError

from mlxserve.hub.head_families import FAMILIES
from mlxserve.text.parsing.elements import ElementSyntax
from mlxserve.text.parsing.formats import FORMATS, NAME, Syntax
from mlxserve.text.parsing.syntax import CallNumbers, Section

ROOT = Path(__file__).parent.parent
PACKAGES = ("metal_kernels", "mlxserve", "tui")
_OF_ONE_MATCH = ("match", "fullmatch", "search")
_OF_ALL_MATCHES = ("findall", "finditer", "split", "sub", "subn")
METHODS = (*_OF_ONE_MATCH, *_OF_ALL_MATCHES)
Matcher: TypeAlias = Callable[[str], object]


def _heads() -> Iterator[str]:
    """The expressions of all formats with markup around the names of arguments."""
    with patch.object(re, "compile", wraps=re.compile) as compiled:
        for row in FORMATS:
            if row.syntax is Syntax.ELEMENTS:
                ElementSyntax(Section(row=row, schemas={}, numbers=CallNumbers()))
    for call in compiled.call_args_list:
        yield call.args[0]


def _families() -> Iterator[Mapping[str, Any]]:
    yield {"tokens": ["<|a|>", "<|a"]}
    for pattern in (
        NAME,
        *vars(import_module("mlxserve.text.guidance.families"))["_KEYS"].values(),
    ):
        yield {"pattern": pattern}


# module: what variables of its functions may be
LOCALS: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]] = {
    "mlxserve.doctor.report_file": lambda: [{"user": "aa"}, {"folder": "/a/a"}],
    "mlxserve.hub.head_families": lambda: [
        {"self": family, "layers": 61} for family in FAMILIES.values()
    ],
    "mlxserve.text.guidance.families": _families,
    "mlxserve.text.learnt_formats": lambda: [
        {
            "name": "zqtool",
            "value": "zqvalue",
            "number": 31,
            "tags": "(?P=q)<a>b(?P=q)</a>",
            "written": r"call:zqtool\{a:(?P<quote>\S{1,16}?)zqvalue(?P=quote),"
            r"b:(?:31|(?P=quote)31(?P=quote))\}",
            "pair": ("0", "1"),
        }
    ],
    "mlxserve.text.parsing.elements": lambda: (
        {"first": head, "others": "", "fixed": [""]} for head in _heads()
    ),
    "mlxserve.text.parsing.formats": lambda: [{"markers": r"<\|start\|>|<\|channel\|>"}],
    "mlxserve.text.parsing.json_calls": lambda: (
        {"self": SimpleNamespace(row=row)} for row in FORMATS if row.header
    ),
    "tui.chat.pasted": lambda: [{"marks": r"\[pasted\ 1\ line\]|\[pasted\ 1\ line,\ 2\]"}],
    "tui.widgets.dialogs": lambda: [{"words": "aa"}],
    "tui.widgets.strips": lambda: [{"words": "aa"}],
}


@dataclass(frozen=True)
class Expression:
    """name: where it is. matchers: what the product calls on texts"""

    name: str
    pattern: re.Pattern[Any]
    matchers: Mapping[str, Matcher]


def expressions() -> Iterator[Expression]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield from expressions_of(tree, module.removesuffix(".__init__"))


def expressions_of(tree: ast.Module, module: str) -> Iterator[Expression]:
    used: dict[str, set[str]] = {}
    for owner, method in _method_calls(tree):
        used.setdefault(owner, set()).add(method)
    names = dict(_assigned(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "re":
            raise AssertionError(f"{module}: import re as a module, so that its calls are found")
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "pattern":
                for value in _values(keyword.value, module):
                    yield _of_pydantic(module, value)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re":
            yield from _of_re(module, node, names, used)


def _of_re(
    module: str, node: ast.Call, names: Mapping[ast.Call, str], used: Mapping[str, set[str]]
) -> Iterator[Expression]:
    assert isinstance(node.func, ast.Attribute)
    function = node.func.attr
    if function != "compile" and function not in METHODS:
        return
    # One whose uses are not seen may be used in every way.
    methods = used.get(names.get(node, ""), METHODS) if function == "compile" else (function,)
    flags = 0
    for flag in (*node.args, *(keyword.value for keyword in node.keywords)):
        for part in ast.walk(flag):
            if isinstance(part, ast.Attribute) and isinstance(
                value := getattr(re, part.attr, None), re.RegexFlag
            ):
                flags |= value
    for value in _values(node.args[0], module):
        pattern = re.compile(value, flags)
        matchers = {method: matcher(pattern, method) for method in sorted(methods)}
        yield Expression(f"{module}: {value!r}", pattern, matchers)


def _of_pydantic(module: str, value: str) -> Expression:
    validate = TypeAdapter(Annotated[str, Field(pattern=value)]).validate_python

    def validated(text: str) -> None:
        try:
            validate(text)
        except ValidationError:
            return

    return Expression(f"{module}: {value!r}", re.compile(value), {"validate": validated})


def _method_calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, method) where a method of something is mentioned, as in `_PART.match` and `self._part.match`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield ast.unparse(node.value).rpartition(".")[2], node.attr


def _assigned(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Calls whose value gets a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield node.value, ast.unparse(node.targets[0]).rpartition(".")[2]


def _values(node: ast.expr, module: str) -> Iterator[Any]:
    scope = vars(import_module(module))
    code = compile(ast.Expression(node), module, "eval")
    is_found = False
    for variables in ({}, *LOCALS.get(module, tuple)()):
        try:
            yield eval(code, {**scope, **variables})
        except NameError:
            continue
        is_found = True
        if not variables:
            return
    assert is_found, f"{module}: LOCALS needs examples of what {ast.unparse(node)} takes"


def timed_as(method: str) -> str:
    """Return the method whose time stands for that of `method`: to find all matches takes one time."""
    return "finditer" if method in _OF_ALL_MATCHES else method


def matcher(pattern: re.Pattern[Any], method: str) -> Matcher:
    """What a method of a pattern does with a text, without what it returns."""
    if method in _OF_ONE_MATCH:
        found: Matcher = getattr(pattern, method)
    else:
        found = lambda text: deque(pattern.finditer(text), maxlen=0)  # noqa: E731
    if isinstance(pattern.pattern, bytes):
        return lambda text: found(text.encode("latin-1", "replace"))  # type: ignore[arg-type]
    return found


# ---- texts

_parser: Any = import_module("re._parser")
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
_MANY = 256  # a repeat of at most so many is a constant factor
_CATEGORIES = {
    _parser.CATEGORY_DIGIT: "1",
    _parser.CATEGORY_NOT_DIGIT: "a",
    _parser.CATEGORY_SPACE: " ",
    _parser.CATEGORY_NOT_SPACE: "a",
    _parser.CATEGORY_WORD: "a",
    _parser.CATEGORY_NOT_WORD: "-",
}
_OTHERS = "a1 -~\n\0"
_MAX_ALPHABET, _MAX_PAIRED, _MAX_AFTER = 12, 4, 3
_NUM_SAMPLES = 24  # of the whole pattern
_IN_TURN: tuple[Callable[[int], int], ...] = tuple(partial(mod, number) for number in range(3))
_FIRST = _IN_TURN[0]
Item: TypeAlias = tuple[Any, Any]


def texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """(before, unit, after): texts whose unit is repeated, of the pattern's own characters."""
    items = list(_parser.parse(pattern.pattern, pattern.flags))
    alphabet = list(dict.fromkeys(_alphabet(items)))
    alphabet = alphabet[:: max(1, len(alphabet) // _MAX_ALPHABET)]
    repeats = list(_repeats(items, ""))
    units = dict.fromkeys(alphabet)
    units |= dict.fromkeys(map("".join, permutations(alphabet[:_MAX_PAIRED], 2)))
    units |= dict.fromkeys(_sample(body, pick) for _, body in repeats for pick in _IN_TURN)
    units |= dict.fromkeys(_sample(items[:end], _FIRST) for end in range(1, len(items) + 1))
    befores = dict.fromkeys(("", *(before for before, _ in repeats)))
    afters = dict.fromkeys(("", "\0", "\n", *alphabet[:_MAX_AFTER]))
    whole = {_sample(items, Random(seed).randrange) for seed in range(_NUM_SAMPLES)}
    yield from product(befores, filter(None, units), afters)
    yield from product(["\0"], filter(None, units), ["\0"])  # behind what no `^` matches
    yield from product([""], sorted(filter(None, whole - units.keys())), ["", "\0"])


def _parts(item: Item) -> list[Sequence[Item]]:
    """The sequences inside an item."""
    kind, value = item
    if kind in _REPEATS:
        return [value[2]]
    if kind is _parser.BRANCH:
        return list(value[1])
    if kind is _parser.SUBPATTERN:
        return [value[3]]
    if kind is _parser.ATOMIC_GROUP:
        return [value]
    if kind in (_parser.ASSERT, _parser.ASSERT_NOT):
        return [value[1]]
    if kind is _parser.GROUPREF_EXISTS:
        return [one for one in value[1:] if one is not None]
    return []


def _repeats(items: Sequence[Item], before: str) -> Iterator[tuple[str, Sequence[Item]]]:
    """(what leads to it, its body) of each unbounded repeat."""
    for at, item in enumerate(items):
        here = before + _sample(items[:at], _FIRST)
        if item[0] in _REPEATS and item[1][1] > _MANY:
            yield here, item[1][2]
        for part in _parts(item):
            yield from _repeats(part, here)


def _sample(items: Sequence[Item], pick: Callable[[int], int]) -> str:
    """A text that the items match, up to what they assert; `pick` chooses one of so many alternatives."""
    text = ""
    for item in items:
        kind, value = item
        members = _members(item)
        if members:
            text += members[pick(len(members))]
        elif kind in _REPEATS:
            text += _sample(value[2], pick) * min(max(value[0], 1), value[1])
        elif kind not in (_parser.ASSERT, _parser.ASSERT_NOT) and (parts := _parts(item)):
            text += _sample(parts[pick(len(parts))], pick)
    return text


def _members(item: Item) -> list[str]:
    """Some characters that an item of one character matches."""
    kind, value = item
    if kind is _parser.LITERAL:
        return [chr(value)]
    if kind is _parser.NOT_LITERAL:
        return [one for one in _OTHERS if ord(one) != value]
    if kind is _parser.ANY:
        return ["a", " "]
    if kind is _parser.IN:
        listed = [one for member in value for one in _listed(member)]
        if value[0][0] is _parser.NEGATE:
            return [one for one in _OTHERS if one not in listed] or ["é"]
        return listed
    return []


def _listed(member: Item) -> list[str]:
    kind, value = member
    if kind is _parser.LITERAL:
        return [chr(value)]
    if kind is _parser.RANGE:
        return [chr(value[0]), chr(value[1])]
    return [_CATEGORIES[value]] if kind is _parser.CATEGORY else []


def _alphabet(items: Sequence[Item]) -> Iterator[str]:
    """What the items match, and what their negated classes do not."""
    for item in items:
        yield from _members(item)[:2]
        if item[0] is _parser.NOT_LITERAL:
            yield chr(item[1])
        if item[0] is _parser.IN:
            for member in item[1]:
                yield from _listed(member)
        for part in _parts(item):
            yield from _alphabet(part)


# ---- time

# Steps small enough that exponential time is seen before it takes a minute.
_STEPS = (12, 18, 27, 40, 70, 120, 200, 350, 600, 1_000, 4_000)
_SHORT, _LONG = 4_000, 16_000
MAX_RATIO = 6.0
# Seconds: 4,000 characters take 0.03 ms, 0.5 where each of them is a match, and 8 by the square.
_FLOOR = 0.001
# Each has to find it. A busy machine has made one of them find it in an expression of linear time.
_ROUNDS = 4


def superlinear(run: Matcher, pattern: re.Pattern[Any]) -> tuple[str, str, str] | None:
    """A text of which four times as much takes more than six times as long."""
    for before, unit, after in texts(pattern):
        make = partial(_text, before, unit, after)
        for size in _STEPS:
            if _seconds(run, make(size)) > _FLOOR and _grows(run, make, size):
                return before, unit, after
    return None


def _text(before: str, unit: str, after: str, size: int) -> str:
    return before + unit * (size // len(unit) or 1) + after


def _grows(run: Matcher, make: Callable[[int], str], size: int) -> bool:
    short, long = (_SHORT, _LONG) if size == _SHORT else (size // 4, size)
    return all(_grows_once(run, make, short, long) for _ in range(_ROUNDS))


def _grows_once(run: Matcher, make: Callable[[int], str], short: int, long: int) -> bool:
    """By processor time, the best of three: other programs make it longer, not shorter."""
    text, longer = make(short), make(long)
    limit = max(_FLOOR, MAX_RATIO * min(_seconds(run, text) for _ in range(3)))
    return all(_seconds(run, longer) > limit for _ in range(3))


def _seconds(run: Matcher, text: str) -> float:
    began = time.thread_time()
    run(text)
    return time.thread_time() - began
