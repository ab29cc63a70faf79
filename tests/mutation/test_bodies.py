"""Rules of request bodies: without each the tests that are made from the models fail."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlxserve.api.bodies import json_body, request_body, spellings
from mlxserve.api.bodies.request_body import StrictModel
from mlxserve.api.errors import ApiError
from tests.api.bodies import test_json_body, test_spellings
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "take a whole number with a point for a fraction": Bug(
        request_body,
        "_whole",
        "return int(value)",
        "return value",
        test_spellings.test_numbers_with_a_point_are_whole_in_lists_and_only_if_nothing_is_behind_it,
    ),
    "require a field that is only sometimes needed": Bug(
        StrictModel,
        "_may_be_absent",
        "not field.is_required()",
        "False",
        test_spellings.test_null_and_empty_are_absent_where_a_field_may_be,
        {"name": "OllamaOptions"},
    ),
    "take an empty value for a request": Bug(
        request_body,
        "_requests_nothing",
        "value is None or _is_empty(value)",
        "value is None",
        test_spellings.test_an_empty_value_of_a_field_that_is_not_supported_requests_nothing,
        {"model": test_spellings.ChatRequest},
    ),
    "lose the text of a custom tool's call": Bug(
        spellings,
        "nested_call",
        'custom.get("input") or ""',
        '""',
        test_spellings.test_a_custom_tools_call_in_a_history_has_its_text,
        {"dialect": "chat"},
    ),
    "keep a byte order mark": Bug(
        json_body,
        "_decoded",
        "raw = raw.removeprefix(BOM_UTF8)",
        "pass",
        test_json_body.test_a_byte_order_mark_before_the_body_is_skipped,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_rule_that_is_broken_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, ApiError, ValidationError))
