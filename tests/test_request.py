"""Requests and chunks say what they are."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import Chunk, FinishReason, LiveRequest, Request, RequestState, as_page_table


def request(**options: Any) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(), **options)


def test_what_was_asked_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        request().priority = 1  # type: ignore[misc]


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


def test_tokens_after_the_prompt_are_outputs() -> None:
    found = LiveRequest(request())
    found.token_ids.extend([4, 5])
    assert (found.num_prompt, found.num_outputs) == (3, 2)


def test_a_finished_request_says_so() -> None:
    found = LiveRequest(request(), state=RequestState.FINISHED)
    assert found.is_finished


def test_a_request_is_itself_and_no_other() -> None:
    one, other = request(), request()
    assert one != other
    assert len({one, other}) == 2


def test_a_chunk_ends_where_its_tokens_do() -> None:
    chunk = Chunk(LiveRequest(request()), 16, 5, as_page_table([0, 1]), samples=False)
    assert chunk.end == 21
    assert not chunk.is_lazy


def test_finish_reasons_are_the_apis_words_but_for_repetition() -> None:
    assert [str(reason) for reason in FinishReason] == [
        "stop",
        "length",
        "tool_calls",
        "repetition",
        "abort",
    ]
