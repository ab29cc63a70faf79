"""Guesses of guided answers, cut where their grammars refuse them.

    device    guesses ──▶ forward ──────────────────────────▶ logits ──▶ sample, each row with its mask
    host              └─▶ read ──▶ grammars follow them ──▶ masks ────────┘

So the host waits for the guesses in the middle of a step, while the forward runs. A token is sampled with the mask
that it has without drafts: the one after the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, takewhile

import mlx.core as mx

from metal_kernels.reading import read
from mlxserve.request import GUESS, Chunk

REFUSED = GUESS - 1  # in place of a guess after which no mask is known: it equals no token


def allowed_guesses(
    chunks: Sequence[Chunk], guesses: mx.array, begin: Callable[[], None] | None = None
) -> mx.array:
    """Return the guesses with REFUSED in place of what the grammars of guided answers do not follow.

    Waits for the guesses, and for the masks after them, if any of these answers is guided.

    chunks: those whose drafts are guessed
    begin: starts the forward, which runs meanwhile; None if it must wait for an earlier step
    """
    guides = [chunk.request.asked.guide for chunk in chunks]
    if not any(guide is not None for guide in guides):
        return guesses
    if begin is not None:
        begin()
    ids = iter(read(guesses).tolist())
    drafts = [list(islice(ids, len(chunk.draft))) for chunk in chunks]
    for guide, draft in zip(guides, drafts, strict=True):
        if guide is not None and draft[0] != GUESS:
            guide.expect(list(takewhile(lambda token: token >= 0, draft)))
    for guide, draft in zip(guides, drafts, strict=True):
        if guide is not None:
            guide.mask()  # of all grammars, the first one that is waited for sends the guesses
            pairs = zip(draft, guide.foreseen, strict=False)
            num_allowed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            refused = draft[num_allowed:]
            draft[num_allowed:] = [GUESS if token == GUESS else REFUSED for token in refused]
    return mx.array([token for draft in drafts for token in draft], mx.int32)
