"""What reads a duration, a size, a number, a date or a name of a stranger takes linear time.

Work is counted, not timed, where a parser is Python: by the lines it executes. C code that it calls
is timed beside, with a floor far above what is linear.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

from mlxserve.api.access.names import host_name, is_of_app
from mlxserve.chat.registry.keep_alive import keep_alive_seconds
from mlxserve.core.errors import MlxServeError
from mlxserve.hub.gguf_places import hub_reference
from mlxserve.images.domains import AllowedDomains
from mlxserve.images.sources import file_of_data_url
from mlxserve.system import addresses
from mlxserve.system.files import own_json

PARSERS: dict[str, Callable[[str], object]] = {
    "a duration": keep_alive_seconds,
    "an address": addresses.parse,
    "a Host header": host_name,
    "an origin": is_of_app,
    "a data URL": lambda text: file_of_data_url(f"data:image/png;base64,{text}"),
    "the parameters of a data URL": lambda text: file_of_data_url(f"data:{text},AAAA"),
    "a domain": lambda text: AllowedDomains.from_texts([text]),
    "a host of a domain": AllowedDomains.from_texts(["example.org"]).allow,
    "a number of a file of ours": lambda text: own_json(f'{{"a": {text}}}'.encode()),
    "a file on the hub": hub_reference,
}
UNITS = (
    "1",
    "0",
    "9",
    ".",
    "1.",
    "1h",
    "1ms",
    "-",
    "+",
    " ",
    "a",
    "a.",
    ":",
    "/",
    "=",
    "e",
    "1e",
    "_",
    "%",
    "\\",
    "é",
)
ENDS = ("", "\0")
SHORT, LONG, MAX_RATIO = 4_000, 16_000, 6.0
FLOOR = 0.02  # seconds of C code: linear takes a hundredth


def _num_lines(run: Callable[[], object]) -> int:
    count = 0

    def trace(_frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(MlxServeError, ValueError):
            run()
    finally:
        sys.settrace(before)
    return count


def _seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    with suppress(MlxServeError, ValueError):
        run()
    return time.thread_time() - began


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_is_linear(name: str) -> None:
    parse = PARSERS[name]
    for unit in UNITS:
        for end in ENDS:
            short, long = (unit * (size // len(unit)) + end for size in (SHORT, LONG))
            counts = [_num_lines(partial(parse, text)) for text in (short, long)]
            assert counts[1] <= max(MAX_RATIO * counts[0], 1_000), (unit, end, counts)
            if _seconds(partial(parse, long)) > FLOOR:
                ratio = min(_seconds(partial(parse, long)) for _ in range(4))
                assert ratio <= max(
                    MAX_RATIO * min(_seconds(partial(parse, short)) for _ in range(4)), FLOOR
                ), (unit, end)
