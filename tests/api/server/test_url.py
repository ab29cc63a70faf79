"""The address that a server prints: one that its clients can use."""

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.api.server.server import reachable_url
from mlxserve.system import addresses


class Listener:
    def __init__(self, *address: Any) -> None:
        self._address = address

    def getsockname(self) -> Any:
        return self._address


@pytest.mark.parametrize("own", ["192.168.1.5", None])
@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        (("192.168.7.7", 8000), "http://192.168.7.7:8000"),
        (("::1", 8000, 0, 0), "http://[::1]:8000"),
        (("0.0.0.0", 8000), None),
        (("::", 8000, 0, 0), None),
    ],
)
def test_a_server_on_all_addresses_names_the_one_that_others_use(
    monkeypatch: pytest.MonkeyPatch, own: str | None, address: tuple[Any, ...], url: str | None
) -> None:
    monkeypatch.setattr(addresses, "own_address", lambda: own)
    expected = url or f"http://{own or '127.0.0.1'}:8000"
    assert reachable_url(Listener(*address)) == expected  # type: ignore[arg-type]
