"""Oracle: a source of drafts that knows the answers, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from mlxserve.request import LiveRequest
from mlxserve.scheduler.drafts import LookupDrafts

MAX_TOKENS = 7


@dataclass
class Oracle:
    """Drafts of 0 to 7 tokens, each of them wrong with a chance of `wrong`.

    answers: by prompt and seed. Other requests have drafts of tokens at random
    """

    wrong: float = 0.25
    answers: dict[tuple[tuple[int, ...], int | None], tuple[int, ...]] = field(default_factory=dict)
    accepted: list[tuple[int, int]] = field(default_factory=list)  # (drafted, accepted)

    def learn_answers(
        self, prompts: Sequence[Sequence[int]], seed: int | None, answers: Sequence[tuple[int, ...]]
    ) -> None:
        self.answers |= {
            (tuple(prompt), seed): answer for prompt, answer in zip(prompts, answers, strict=True)
        }

    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:
        prompt = tuple(request.token_ids[: request.num_prompt])
        done = len(request.token_ids) - len(prompt)
        draw = random.Random(f"{prompt[-3:]} {done} {len(self.answers)}")
        answer = self.answers.get((prompt, request.asked.params.seed), ())
        right = answer[done : done + min(draw.randrange(MAX_TOKENS + 1), max_tokens)]
        return tuple((token + 1) % 400 if draw.random() < self.wrong else token for token in right)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Make all drafts of engines that have any, of every decode of a step."""

        def learn(_: LookupDrafts, __: LiveRequest, num_drafted: int, num_accepted: int) -> None:
            self.accepted.append((num_drafted, num_accepted))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LookupDrafts, "expects_draft", lambda *_: True)
            patch.setattr(LookupDrafts, "draft", lambda _, request, most: self.draft(request, most))
            patch.setattr(LookupDrafts, "learn", learn)
            patch.setattr(LookupDrafts, "pays", lambda *_: True)
            patch.setattr(LookupDrafts, "choose", _all)
            yield


def _all(
    _: LookupDrafts, __: int, drafts: Mapping[LiveRequest, tuple[int, ...]], max_tokens: int
) -> dict[LiveRequest, tuple[int, ...]]:
    """Choose every draft that the step has room for."""
    chosen = {}
    for request, draft in drafts.items():
        chosen[request] = draft[:max_tokens]
        max_tokens -= len(chosen[request])
    return {request: draft for request, draft in chosen.items() if draft}
