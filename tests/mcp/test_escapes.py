import json
from random import Random

from mlxserve.mcp.escapes import HalvesFilter, without_halves
from mlxserve.system.well_formed import well_formed

PIECES = (
    r"\ud83d",
    r"\ude00",
    r"\uD83D\uDE00",
    r"\\",
    r"\n",
    r"\"",
    r"\u0041",
    "u",
    "d83d",
    "ü",
    "x",
)


def test_escapes_of_halves_are_replaced_in_pieces_of_any_size() -> None:
    rng = Random(0)
    for _ in range(2_000):
        written = f'"{"".join(rng.choices(PIECES, k=rng.randrange(10)))}"'
        assert json.loads(without_halves(written)) == well_formed(json.loads(written)), written
        content, found, halves = written.encode(), b"", HalvesFilter()
        while content:
            size = rng.randrange(1, 9)
            found += halves.push(content[:size])
            content = content[size:]
        assert (found + halves.finish()).decode() == without_halves(written)


def test_a_filter_holds_back_only_what_may_be_half_of_a_pair() -> None:
    halves = HalvesFilter()
    assert halves.push(rb"a\\ b\ud83d") == rb"a\\ b"
    assert halves.push(rb"\u") == b""
    assert halves.push(rb"0041 c") == rb"\ufffd\u0041 c"
    assert halves.finish() == b""
