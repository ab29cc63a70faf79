"""Requests and chunks say what they are."""

from __future__ import annotations

from typing import Any

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import FinishReason, LiveRequest, Request, RequestState


def request(**options: Any) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(), **options)


def test_progress_leaves_the_prompt_as_it_was_asked() -> None:
    asked = request(page_hashes=[b"a"])
    live = LiveRequest(asked)
    live.token_ids.append(4)
    live.page_hashes.append(b"b")
    assert [*asked.token_ids] == [1, 2, 3]
    assert asked.page_hashes == [b"a"]


def test_a_request_begins_waiting_with_nothing_but_its_prompt() -> None:
    found = LiveRequest(request())
    assert found.state is RequestState.WAITING
    assert (found.num_prompt, found.num_outputs, found.num_computed) == (3, 0, 0)
    assert not found.page_table
    assert not found.is_finished


def test_a_request_is_itself_and_no_other() -> None:
    one, other = request(), request()
    assert one != other
    assert len({one, other}) == 2


def test_finish_reasons_are_the_apis_words_but_for_repetition() -> None:
    assert [str(reason) for reason in FinishReason] == [
        "stop",
        "length",
        "tool_calls",
        "repetition",
        "abort",
    ]
