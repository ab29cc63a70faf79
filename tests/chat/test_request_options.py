"""Options of a request are checked when they are constructed, whoever constructs them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.errors import InvalidParameter
from mlxserve.request import BACKGROUND
from mlxserve.text.parsing.turn import AssistantTurn


def test_a_value_of_the_wrong_kind_is_refused_by_its_name() -> None:
    for name, value in [
        ("cache_salt", b"salt"),
        ("cache_salt", 7),
        ("prefix_name", ["rules"]),
        ("skip_prefix_cache", None),
        ("client", None),
        ("priority", "high"),
        ("priority", True),
        ("priority", 0.5),
        ("request_id", 7),
        ("turn", {"tools": []}),
    ]:
        with pytest.raises(InvalidParameter, match=f"^{name}: must be") as caught:
            RequestOptions(**{name: value})
        assert caught.value.name == name, name


def test_a_request_that_skips_the_cache_has_no_named_prefix() -> None:
    RequestOptions(skip_prefix_cache=True)
    with pytest.raises(InvalidParameter, match="skip_prefix_cache: cannot be combined with prefix"):
        RequestOptions(skip_prefix_cache=True, prefix_name="rules")


def test_values_of_the_right_kind_are_kept() -> None:
    turn = AssistantTurn()
    options = RequestOptions(cache_salt="a", priority=-3, client="b", prefix_name="c", turn=turn)
    assert (options.cache_salt, options.priority, options.client) == ("a", -3, "b")
    assert (options.prefix_name, options.turn) == ("c", turn)


def test_background_is_a_low_priority() -> None:
    options: dict[str, Any] = {"priority": "background"}
    assert RequestOptions(**options).priority == BACKGROUND > RequestOptions().priority


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="salt"):
        RequestOptions(salt="a")  # type: ignore[call-arg]
