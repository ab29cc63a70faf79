"""Rules of request bodies and histories: without each a test fails."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlxserve.api import ollama_models
from mlxserve.api.bodies import json_body, request_body, spellings
from mlxserve.api.bodies.request_body import StrictModel
from mlxserve.api.errors import ApiError
from mlxserve.api.paths import CanonicalPaths
from mlxserve.api.prompts import Prompts
from mlxserve.text import template_compat
from mlxserve.text.guidance import schemas
from mlxserve.text.tokenizer import Tokenizer
from tests.api import test_app
from tests.api.bodies import test_json_body, test_spellings
from tests.api.conftest import chat as chat
from tests.api.conftest import client as client
from tests.api.native import test_infill
from tests.api.ollama import test_routes
from tests.mutation.bug import Bug
from tests.text import test_fill_in_middle, test_template_compat
from tests.text.guidance import test_narrowed_schemas

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
        "value is None or _is_empty(value) or",
        "value is None or",
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
    "leave a call without a result where a template needs one": Bug(
        template_compat,
        "results_of_all_calls",
        "if call.id not in answered",
        "if False",
        test_template_compat.test_every_call_has_one_result_and_every_text_a_place,
    ),
    "lose the text beside a call": Bug(
        template_compat,
        "texts_after_calls",
        'message.text if message.calls else ""',
        '""',
        test_template_compat.test_every_call_has_one_result_and_every_text_a_place,
    ),
    "take options that may overlap for disjoint ones": Bug(
        schemas,
        "_are_disjoint",
        "return any(map(",
        "return True or any(map(",
        test_narrowed_schemas.test_one_of_is_any_of_and_told_where_options_may_overlap,
        {"options": [{"type": "number"}, {"type": "integer"}], "is_disjoint": False},
    ),
    "check a path before it is canonical": Bug(
        CanonicalPaths,
        "_canonical",
        "return next((meant for meant in _meant(path) if self._is_known(meant)), path)",
        "return path",
        test_app.test_a_path_is_canonical_before_it_is_checked,
    ),
    "leave the last line of a stream open": Bug(
        ollama_models,
        "lines_or_object",
        "if not body.stream:",
        "if True:",
        test_routes.test_pulling_the_served_model_succeeds,
    ),
    "take tokens of a suffix for the model's own": Bug(
        Tokenizer,
        "encode_middle",
        "as_text=True",
        "as_text=False",
        test_fill_in_middle.test_a_tokenizer_encodes_a_middle_whose_texts_hold_no_tokens,
    ),
    "let a model go on after the middle": Bug(
        Prompts,
        "infilling",
        "(*params.stop_token_ids, *ends)",
        "params.stop_token_ids",
        test_infill.test_a_suffix_is_after_the_middle,
        {"path": "/v1/completions"},
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
    FOUND[name].check_found(request, (AssertionError, ApiError, LookupError, ValidationError))
