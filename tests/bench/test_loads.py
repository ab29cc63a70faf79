"""Each load sends the requests that its claim is about."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from mlxserve.bench import loads
from mlxserve.bench.client import TimedRequest


class Client:
    """Answers at once with the most words allowed, and records the concurrency."""

    def __init__(self) -> None:
        self.requests: list[TimedRequest] = []
        self.prompts: list[list[str]] = []
        self.together: list[int] = []
        self._running = 0

    async def ask(
        self,
        prompt: str,
        max_tokens: int,
        *,
        label: str = "",
        on_text: Callable[[TimedRequest], None] = lambda _: None,
    ) -> TimedRequest:
        request = TimedRequest(label, 0.0)
        self.requests.append(request)
        self.prompts.append(prompt.split())
        self._running += 1
        self.together.append(self._running)
        for _ in range(max_tokens):
            request.times.append(1.0)
            on_text(request)
            await asyncio.sleep(0)
        self._running -= 1
        request.text = " ".join(["a"] * max_tokens)
        return request


def played(play: loads.Play, size: float = 1.0, **options: Any) -> Client:
    client = Client()
    context = loads.LoadContext(client, random.Random(1), size, between=0)  # type: ignore[arg-type]
    asyncio.run(play(context, **options))  # type: ignore[call-arg]
    return client


def common(prompts: list[list[str]]) -> int:
    """Length of the common prefix, in words."""
    return next(
        (at for at, words in enumerate(zip(*prompts, strict=False)) if len(set(words)) > 1),
        min(map(len, prompts)),
    )


@pytest.mark.parametrize("share", [0.1, 1 / 3.05, 0.9])
def test_prefix_prompts_share_the_given_part(share: float) -> None:
    client = played(loads.prefix, share=share)
    assert {len(prompt) for prompt in client.prompts} == {400}
    assert common(client.prompts) == pytest.approx(share * 400, abs=1)
    assert client.together[0] == 1
    assert max(client.together) == 4


def test_admission_has_twelve_of_sixteen_pages_cached() -> None:
    client = played(loads.admission)
    assert [len(prompt) for prompt in client.prompts[1:]] == [16 * 32] * 12
    assert common(client.prompts[1:]) >= 12 * 32
    assert max(client.together) == 12


def test_chunked_sends_its_long_prompt_while_answers_run() -> None:
    client = played(loads.chunked)
    assert [len(prompt) for prompt in client.prompts] == [32] * 4 + [1000]
    assert client.together[-1] == 5


def test_each_turn_of_a_chat_continues_the_previous_one() -> None:
    client = played(loads.chat, people=1, turns=3)
    first, second, third = client.prompts
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert second[len(first) :][:16] == ["a"] * 16
    assert [request.label for request in client.requests] == ["turn 1", "turn 2", "turn 3"]


def test_agents_fan_out_from_one_template() -> None:
    client = played(loads.agents)
    assert len(client.prompts) == 5 + 3 * 2
    assert common(client.prompts) == 600


def test_siblings_arrive_together_and_share_a_prefix() -> None:
    client = played(loads.siblings)
    alone, *together = client.prompts
    assert client.together == [1, 1, 2, 3, 4]
    assert common(together) == 600
    assert len(alone) == len(together[0])


def test_again_is_one_prompt_three_times() -> None:
    client = played(loads.again)
    assert client.prompts[0] == client.prompts[1] == client.prompts[2]


def test_preempt_sends_all_prompts_at_once_and_a_size_scales_them() -> None:
    assert max(played(loads.preempt).together) == 10
    assert {len(prompt) for prompt in played(loads.preempt, size=0.1).prompts} == {12}


def test_edit_asks_for_the_prompt_with_changes_and_for_new_words() -> None:
    copied, new = played(loads.edit).prompts
    first = int(copied[-1][1:]) + 1
    answer = [f"w{first + at}" for at in range(300)]
    assert [at for at in range(300) if copied[at] != answer[at]] == [75, 150, 225]
    assert not set(new[:-1]) & set(answer)
    assert new[-1] == copied[-1]


def test_drafts_are_asked_for_in_groups_of_one_two_and_four() -> None:
    client = played(loads.drafts, 0.1)
    groups: dict[str, int] = {}
    for request in client.requests:
        groups[request.label] = groups.get(request.label, 0) + 1
    assert groups == {
        "1 answer that copies": 1,
        "1 answer that is new": 1,
        "2 answers that copy": 2,
        "2 answers that are new": 2,
        "2 answers of both kinds": 2,
        "4 answers that copy": 4,
        "4 answers that are new": 4,
        "4 answers of both kinds": 4,
    }
    assert max(client.together) == 4


def test_groups_of_drafts_are_reported_in_tokens_per_second_of_all() -> None:
    group = [
        TimedRequest("a", 0.0, [1.0, 3.0], 3.0, num_completion=11),
        TimedRequest("a", 0.0, [2.0, 5.0], 6.0, num_completion=16),
        TimedRequest("b", 6.0, [7.0, 8.0], 8.0, num_completion=3),
    ]
    assert loads.drafts_ratios(group) == {"tokens/s, a": 5.0, "tokens/s, b": 2.0}


def test_beside_starts_with_one_running_answer() -> None:
    client = played(loads.beside, 0.01)
    labels = [request.label for request in client.requests]
    assert labels == ["stream", "short prompt", "long prompt"]
    assert client.together == [1, 2, 2]
    assert [len(prompt) for prompt in client.prompts] == [32, 8, 25]


def test_beside_is_reported_in_gaps_of_the_lone_answer() -> None:
    stream = TimedRequest("stream", 0.0, [float(at) for at in range(24)] + [30.0, 31.0])
    short = TimedRequest("short prompt", 24.0, [26.0])
    found = loads.beside_ratios([stream, short])
    assert found == {loads.SHORT: 2.0, loads.GAP: 7.0}


def test_siblings_are_reported_in_times_of_the_lone_prompt() -> None:
    alone = TimedRequest("alone", 0.0, ended=2.0)
    together = [TimedRequest("together", 2.0, ended=4.5), TimedRequest("together", 2.5, ended=5.0)]
    assert loads.siblings_ratios([alone, *together]) == {loads.TOGETHER: 1.5}


def test_again_reports_the_tokens_that_a_repetition_computed() -> None:
    made = [TimedRequest(label, 0.0) for label in ("cold", "again", "again")]
    for request, cached in zip(made, (0, 96, 64), strict=True):
        request.num_prompt, request.num_cached = 100, cached
    assert loads.again_ratios(made) == {loads.COMPUTED_AGAIN: 36.0}


def test_beside_has_no_figures_if_the_answer_ended_before_the_others() -> None:
    stream = TimedRequest("stream", 0.0, [float(at) for at in range(24)])
    short = TimedRequest("short prompt", 24.0, [26.0])
    assert loads.beside_ratios([stream, short]) == {}


def test_lengths_are_cold_prompts_one_after_the_other() -> None:
    client = played(loads.lengths, 0.1)
    assert [len(prompt) for prompt in client.prompts] == [30, 75, 150, 300]
    assert max(client.together) == 1
    assert common(client.prompts) == 0
    assert [request.label for request in client.requests][::3] == ["30 tokens", "300 tokens"]


def test_growth_is_the_power_of_the_length() -> None:
    made = [TimedRequest("", 0.0, [2.0 * length**1.5]) for length in (10, 20, 40)]
    for request, length in zip(made, (10, 20, 40), strict=True):
        request.num_prompt = length
    assert loads.lengths_ratios(made) == {loads.GROWTH: pytest.approx(1.5)}
    assert loads.lengths_ratios(made[:1]) == {}


def test_answers_are_asked_one_four_and_sixteen_at_once_then_on_one_prefix() -> None:
    client = played(loads.answers)
    assert [max(client.together[:1]), max(client.together[1:5]), max(client.together[5:21])] == [
        1,
        4,
        16,
    ]
    assert common(client.prompts[:21]) == 0
    prefix, *on_prefix = client.prompts[21:]
    assert len(on_prefix) == max(client.together[22:]) == 16
    assert common(on_prefix) == 1536 == len(prefix) - 1


def test_rates_count_tokens_from_when_all_have_begun() -> None:
    early = TimedRequest(loads.FOUR, 0.0, [1.0, 2.0, 3.0, 4.0], 4.0)
    late = TimedRequest(loads.FOUR, 0.0, [2.0, 4.0], 4.0)
    early.num_completion, late.num_completion = 4, 4  # two tokens in each piece of the late one
    alone = TimedRequest(loads.ONE, 0.0, [1.0], 1.0)
    alone.num_completion = 1
    found = loads.answers_ratios([early, late, alone])
    assert found == {loads.rate_name(loads.FOUR): 2.0}
