"""Clients of one model with windows, whose memory is divided as a server of a Mac divides it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from mlxserve.cache.groups import Window, split
from mlxserve.request import LiveRequest
from tests.cache.test_groups import GB, MODELS
from tests.scheduler.conftest import GhostEngine

PAGE = 32
STEP = 512
# What is left beside the weights and a step on Macs of 24 and 32 GB.
MACS = [("Gemma 4 26B", 1.2), ("Gemma 4 26B", 4.0), ("Gemma 3 27B", 4.5)]
NEW = 320  # tokens that a turn adds to a conversation
ANSWER = 8
MAX_PAGES = 500  # more than these tests use; the engine audits all of them after each step

on_macs = pytest.mark.parametrize("mac", MACS, ids=lambda mac: f"{mac[0]} {mac[1]} GiB")


def engine_of(make_engine: Callable[..., GhostEngine], mac: tuple[str, float]) -> GhostEngine:
    name, memory = mac
    full, windowed, size, longest, _ = MODELS[name]
    num_pages, num_window_pages = split(
        int(memory * GB),
        full * PAGE,
        windowed * PAGE,
        Window(size, PAGE),
        longest=longest,
        num_seqs=64,
        step_tokens=STEP,
    )
    return make_engine(
        num_pages=min(num_pages, MAX_PAGES),
        page_size=PAGE,
        window=size,
        num_window_pages=num_window_pages,
        max_num_seqs=64,
        max_num_batched_tokens=STEP,
        max_model_len=MAX_PAGES * PAGE,
    )


class Conversation:
    numbers = count(100)

    def __init__(self, engine: GhostEngine, num_tokens: int, client: str) -> None:
        self._engine, self._client = engine, client
        self.tokens = [next(self.numbers) for _ in range(num_tokens)]

    def turn(self) -> int:
        """Tokens that it took to compute the next answer."""
        before = self._engine.num_computed
        request: LiveRequest = self._engine.add(self.tokens, ANSWER, client=self._client)
        self._engine.drain()
        self.tokens = [*request.token_ids, *(next(self.numbers) for _ in range(NEW))]
        return self._engine.num_computed - before


@on_macs
@pytest.mark.parametrize("num_tokens", [600, 1500])
def test_a_short_prompt_does_not_wait_for_the_answer_of_another_client(
    make_engine: Callable[..., GhostEngine], mac: tuple[str, float], num_tokens: int
) -> None:
    engine = engine_of(make_engine, mac)
    other = engine.add(list(range(100, 1600)), 1000, client="other")
    while other.num_outputs < 2:
        engine.step()
    request = engine.add(list(range(5000, 5000 + num_tokens)), 4, client="short")
    for _ in range(-(-num_tokens // STEP) + 2):  # its chunks, and the step that is unread
        engine.step()
    assert request.num_outputs > 0
    engine.abort(other.id)
    engine.drain()


@on_macs
def test_conversations_that_take_turns_are_found_in_the_cache(
    make_engine: Callable[..., GhostEngine], mac: tuple[str, float]
) -> None:
    engine = engine_of(make_engine, mac)
    both = [Conversation(engine, 2500, client) for client in "ab"]
    for one in both:
        one.turn()
    computed = sum(one.turn() for _ in range(2) for one in both)
    assert computed <= 1.5 * 4 * (NEW + ANSWER)


@on_macs
def test_a_request_between_two_turns_leaves_the_conversation_in_the_cache(
    make_engine: Callable[..., GhostEngine], mac: tuple[str, float]
) -> None:
    """As agents send them, for a title or a summary."""
    engine = engine_of(make_engine, mac)
    conversation = Conversation(engine, 2500, "agent")
    conversation.turn()
    for _ in range(2):
        Conversation(engine, 1500, "agent").turn()
        assert conversation.turn() <= 1.5 * (NEW + ANSWER)
