"""Reads the variables of a chat template from its syntax tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from jinja2 import nodes

_WORD = re.compile(r"[a-z][a-z0-9_-]{0,15}")


def literals_of(tree: nodes.Template, variable: str) -> list[str]:
    """List the words that a template compares a variable with or substitutes for it, in order.

    A name that is set to the variable, also with a filter or a default, counts as the variable.
    """
    assigned = [each for each in tree.find_all(nodes.Assign) if isinstance(each.target, nodes.Name)]
    names = {variable}
    while more := {_target(a) for a in assigned if _passes_on(a.node, names)} - names:
        names |= more
    expressions: list[nodes.Node] = [
        each
        for each in tree.find_all((nodes.Compare, nodes.CondExpr, nodes.Filter))
        if _mentions(each, names)
    ]
    expressions += [each.node for each in assigned if _target(each) in names]
    return list(dict.fromkeys(word for each in expressions for word in _words(each)))


def _target(assign: nodes.Assign) -> str:
    assert isinstance(assign.target, nodes.Name)
    return assign.target.name


def _passes_on(value: nodes.Node | None, names: Set[str]) -> bool:
    """True if the value of an expression can be that of one of the names."""
    match value:
        case nodes.Name():
            return value.name in names
        case nodes.Filter():
            return _passes_on(value.node, names)
        case nodes.CondExpr():
            return _passes_on(value.expr1, names) or _passes_on(value.expr2, names)
        case nodes.And() | nodes.Or():
            return _passes_on(value.left, names) or _passes_on(value.right, names)
    return False


def _mentions(node: nodes.Node, names: Set[str]) -> bool:
    own = [node] if isinstance(node, nodes.Name) else []
    return any(name.name in names for name in (*own, *node.find_all(nodes.Name)))


def _words(node: nodes.Node) -> Iterator[str]:
    own = [node] if isinstance(node, nodes.Const) else []
    for constant in (*own, *node.find_all(nodes.Const)):
        if isinstance(constant.value, str) and _WORD.fullmatch(constant.value):
            yield constant.value
