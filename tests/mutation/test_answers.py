"""Mistakes in the reading of answers and of tools' results: each is found by a test."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from mlxserve.history import calls, imports
from mlxserve.history.store import Store
from mlxserve.mcp import results
from mlxserve.mcp.offers import ServerPrompt
from mlxserve.mcp.patience import Patience
from mlxserve.text.parsing.cursor import Cursor
from mlxserve.text.parsing.elements import TagSyntax
from mlxserve.text.parsing.json_text import JsonText
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.syntax import CallSyntax
from tests.history import test_calls, test_imports, test_transfer
from tests.history.conftest import path as path
from tests.history.conftest import store as store
from tests.history.test_transfer import other as other
from tests.mcp import test_patience, test_results, test_toolbox
from tests.mcp.test_toolbox import file as file
from tests.mutation.bug import Bug
from tests.text.parsing import test_extent, test_formats, test_places

pytestmark = pytest.mark.mutation


def run(claim: Any) -> Any:
    """Make a test of a coroutine one of a function."""

    def ran(**fixtures: Any) -> None:
        asyncio.run(claim(**fixtures))

    ran.__signature__ = inspect.signature(claim)  # type: ignore[attr-defined]
    return ran


EMPTY = {
    "name": "minimax_m3",
    "text": ']<]minimax[>[<tool_call><invoke name="rest"/>]<]minimax[>[</tool_call>',
    "arguments": {},
}
FOUND: dict[str, Bug] = {
    "settle a thought before text follows": Bug(
        TurnParser,
        "_wait_for_end",
        "at < 0 or not self._held[at + len(end) :].strip()",
        "at < 0",
        test_places.test_each_marker_means_something_in_its_place,
    ),
    "make calls that a thought only weighs": Bug(
        TurnParser,
        "_settle_doubt",
        "(end and _text_of(events[places[0] : places[-1]]).strip())",
        "False",
        test_places.test_each_marker_means_something_in_its_place,
    ),
    "keep a comma before a bracket": Bug(
        JsonText,
        "_push_outside",
        'drops_comma=char in "}]"',
        "drops_comma=False",
        test_formats.test_json_is_repaired_where_it_has_other_words_for_the_same,
    ),
    "end a text of Python at every quote": Bug(
        JsonText,
        "_push_in_string",
        """char == "'" and self._depth""",
        "False",
        test_formats.test_answers_of_real_models,
    ),
    "end a value at its first marker": Bug(
        Cursor,
        "extent",
        "if is_last:",
        "if is_last or True:",
        test_extent.test_a_value_that_holds_a_marker_is_read_as_it_was_written,
        {"name": "minimax_m3"},
    ),
    "take a tag's end before text for the last": Bug(
        CallSyntax,
        "ends_call",
        "(yield from self.cursor.sees_any(begins, at)) or None",
        "True or (yield from self.cursor.sees_any(begins, at))",
        test_extent.test_a_value_may_speak_of_the_end_of_its_call,
        {"name": "minimax_m3", "ends": "]<]minimax[>[</content>]<]minimax[>[</invoke>"},
    ),
    "read on after an empty element": Bug(
        TagSyntax,
        "read_call",
        "tail != tails[0]",
        "False",
        test_extent.test_an_empty_element_is_a_call_without_arguments,
        EMPTY,
    ),
    "show every image of a result": Bug(
        results,
        "result_of",
        "[:MAX_IMAGES]",
        "[:]",
        test_results.test_images_are_data_urls_bounded_in_number_and_in_size,
    ),
    "forget the images of a kept result": Bug(
        calls,
        "round_fields",
        'if not call["images"]',
        "if True",
        test_calls.test_images_of_a_result_are_kept_and_sent_after_its_text,
    ),
    "extend a call for ever": Bug(
        Patience,
        "left",
        "min(self._heard + self._seconds, latest)",
        "self._heard + self._seconds",
        run(test_patience.test_reports_without_end_do_not_extend_it_for_ever),
    ),
    "ask for a prompt without its arguments": Bug(
        ServerPrompt,
        "values",
        "if missing:",
        "if False:",
        run(test_toolbox.test_prompts_and_resources_of_a_server_are_texts),
    ),
    "import messages that are their own ancestors as none": Bug(
        imports,
        "_parents_first",
        "if num_seen < len(nodes):",
        "if False:",
        test_imports.test_a_hostile_chat_is_refused_by_what_is_wrong,
        {"content": test_imports.chatgpt(*test_imports.CIRCLE), "words": "own ancestors"},
    ),
    "cut a chat at what ChatGPT hides": Bug(
        imports,
        "_made",
        "shown[key], thoughts[key] = above, thinking",
        "shown[key], thoughts[key] = None, thinking",
        test_imports.test_what_chatgpt_hides_leaves_its_children_to_its_parent,
    ),
    "import a chat a second time": Bug(
        Store,
        "insert",
        "return None\n",
        "pass\n",
        test_transfer.test_a_chat_that_is_there_is_left_as_it_is,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_bug_of_answers(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, KeyError, ValueError, pytest.fail.Exception))
