"""Guesses of guided answers are kept up to the first one without a mask."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from metal_kernels.reading import read
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.drafting.guided_guesses import REFUSED, allowed_guesses
from mlxserve.request import GUESS, Chunk, LiveRequest, Request, as_page_table
from tests.scheduler.test_scheduler import GuideThatWaits


class Follows(GuideThatWaits):
    """Allows tokens below 10."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[list[int]] = []

    def expect(self, likely: Sequence[int], /) -> None:
        self.expected.append(list(likely))

    def mask(self, num_foreseen: int = 0, /) -> bytes | None:
        assert num_foreseen == 0
        allowed = [token < 10 for token in self.expected[-1]] if self.expected else []
        end = allowed.index(False) if False in allowed else len(allowed)
        self.foreseen = tuple(self.expected[-1][:end]) if self.expected else ()
        return None


def chunk(guide: Follows | None, num_drafted: int) -> Chunk:
    params = SamplingParams(temperature=0)
    request = LiveRequest(Request("a", [1, 2, 3], params, guide=guide))
    draft = (GUESS,) * num_drafted
    return Chunk(request, 2, 1 + num_drafted, as_page_table([0]), samples=True, draft=draft)


@pytest.mark.parametrize(
    ("guessed", "expected"),
    [
        ([4, 5, 6], [4, 5, 6]),
        ([4, 50, 6], [4, REFUSED, REFUSED]),
        ([40, 5, 6], [REFUSED, REFUSED, REFUSED]),
        ([GUESS, GUESS, GUESS], [GUESS, GUESS, GUESS]),
    ],
    ids=["allowed", "the second refused", "all refused", "not guessed"],
)
def test_guesses_are_kept_up_to_the_first_that_is_refused(
    guessed: list[int], expected: list[int]
) -> None:
    """Those of answers beside it stay, and what was not guessed is told from what was refused."""
    guide = Follows()
    chunks = [chunk(None, 2), chunk(guide, 3), chunk(None, 1)]
    begun: list[bool] = []
    guesses = mx.array([70, 80, *guessed, 90], mx.int32)
    found = allowed_guesses(chunks, guesses, lambda: begun.append(True))
    assert begun == [True], "the forward runs meanwhile"
    assert found.dtype == mx.int32
    assert read(found).tolist() == [70, 80, *expected, 90]
    assert guide.expected == ([] if guessed[0] == GUESS else [guessed])


def test_nothing_is_read_where_no_answer_is_guided() -> None:
    guesses = mx.array([7, 8], mx.int32)
    assert allowed_guesses([chunk(None, 2)], guesses, lambda: pytest.fail("begun")) is guesses
