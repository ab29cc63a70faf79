"""Every index of a kernel that grows with the pool or the batch is 64 bits wide, and must be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_kernels.kernels import ALL, HEADERS
from tests.strict.rules import broken_rules

WIDE = re.compile(
    r"\bconst u?long (?P<variable>\w+) =|\bu?long (?P<parameter>\w+)(?=[,)])|\bu?long\("
)
# Parts of sums alone, and a product of heads and pages of one sequence: none of these overflows.
HARMLESS = ("const long first_query =", "const ulong at =", "ulong(head) * room")
TEXTS = {spec.name: spec.source() for spec in ALL} | HEADERS


def narrowed() -> Iterator[tuple[str, str]]:
    """(what was narrowed, the text): one place of each text at a time."""
    for name, text in TEXTS.items():
        for match in WIDE.finditer(text):
            rest = text[match.start() :].split("\n")[0]
            if not rest.startswith(HARMLESS):
                yield f"{name}: {rest}", text[: match.start()] + narrow(match) + text[match.end() :]


def narrow(match: re.Match[str]) -> str:
    if match["variable"]:
        return f"const int {match['variable']} ="
    return f"int {match['parameter']}" if match["parameter"] else "("


def test_the_texts_keep_the_rule() -> None:
    for name, text in TEXTS.items():
        assert [m for m in broken_rules(text) if "64 bits" in m] == [], name


def test_variables_parameters_and_casts_are_narrowed() -> None:
    kinds = {
        kind
        for text in TEXTS.values()
        for match in WIDE.finditer(text)
        for kind in match.groupdict()
        if match[kind]
    }
    assert kinds == {"variable", "parameter"}


def test_an_index_of_32_bits_is_refused() -> None:
    for name, text in narrowed():
        assert any("64 bits" in message for message in broken_rules(text)), name
