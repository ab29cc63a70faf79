"""Every index of a kernel that grows with the pool or the batch is 64 bits wide, and must be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from metal_kernels.kernels import ALL
from tests.strict.rules import broken_rules

WIDE = re.compile(r"\bconst u?long (\w+) =|\bu?long\(")
# Parts of sums alone, and a product of heads and pages of one sequence: none of these overflows.
HARMLESS = ("const long first_query =", "const ulong at =", "ulong(head) * seen")
COMMENT = re.compile(r"//[^\n]*")


def narrowed() -> Iterator[tuple[str, str]]:
    """(what was narrowed, the text) of each kernel: one place at a time."""
    for spec in ALL:
        source = COMMENT.sub("", spec.source())
        for match in WIDE.finditer(source):
            rest = source[match.start() :].split("\n")[0]
            narrow = f"const int {match[1]} =" if match[1] else "("
            if not rest.startswith(HARMLESS):
                text = source[: match.start()] + narrow + source[match.end() :]
                yield f"{spec.name}: {rest}", text


def test_the_texts_keep_the_rule() -> None:
    for spec in ALL:
        assert [m for m in broken_rules(spec.source()) if "64 bits" in m] == [], spec.name


def test_an_index_of_32_bits_is_refused() -> None:
    for name, text in narrowed():
        assert any("64 bits" in message for message in broken_rules(text)), name
