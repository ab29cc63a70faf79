from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.text.signature import MAX_THINKING, sign, signed_thinking


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_thinking_comes_back_as_it_was(thinking: str) -> None:
    assert signed_thinking(sign(thinking)) == thinking


def test_a_signature_is_plain_ascii_and_shorter_than_repetitive_thinking() -> None:
    signature = sign("Let me think. " * 1_000)
    assert signature.isascii()
    assert len(signature) < 1_000


@pytest.mark.parametrize("at", [12, 20, -2])
def test_a_damaged_signature_is_ignored(at: int) -> None:
    signature = sign("First é, then 2. " * 5)
    other = "A" if signature[at] != "A" else "B"
    damaged = signature[:at] + other + (signature[at + 1 :] if at != -1 else "")
    assert signed_thinking(damaged) in ("", "First é, then 2. " * 5)
    assert signed_thinking(signature[: len(signature) // 2]) == ""


def test_what_is_not_ours_is_ignored() -> None:
    for signature in [None, "", "mlxserve", "mlxserve1.", "mlxserve1.é", "EqQB"]:
        assert signed_thinking(signature) == "", signature


def test_a_signature_that_unpacks_to_too_much_is_ignored() -> None:
    assert signed_thinking(sign("a" * (MAX_THINKING + 1))) == ""
