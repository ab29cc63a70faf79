"""What reads a duration, a size, a number, a date or a name of a stranger takes linear time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mlxserve.api.access.names import host_name, is_of_app
from mlxserve.chat.registry.keep_alive import keep_alive_seconds
from mlxserve.hub.gguf_places import hub_reference
from mlxserve.images.data_urls import file_of_data_url
from mlxserve.images.domains import AllowedDomains
from mlxserve.system import addresses
from mlxserve.system.files import own_json
from tests.linear import grows_in_lines, grows_in_time

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
SHORT, LONG = 4_000, 16_000


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_is_linear(name: str) -> None:
    parse = PARSERS[name]
    for unit in UNITS:
        for end in ENDS:
            short, long = (unit * (size // len(unit)) + end for size in (SHORT, LONG))
            assert not grows_in_lines(partial(parse, short), partial(parse, long)), (unit, end)
            assert not grows_in_time(partial(parse, short), partial(parse, long)), (unit, end)
