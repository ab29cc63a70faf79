"""Guesses of guided answers, cut where their grammars refuse them.

    device    guesses ──▶ forward ──────────────────────────▶ logits ──▶ sample, each row with its mask
    host              └─▶ read ──▶ grammars follow them ──▶ masks ────────┘

So the host waits for the guesses in the middle of a step, while the forward runs. A token is sampled with the mask
that it has without drafts: the one after the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

import mlx.core as mx

from metal_kernels.reading import read
from mlxserve.request import GUESS, Chunk

REFUSED = GUESS - 1  # in place of a guess after which no mask is known: it equals no token


def has_guides(drafting: Sequence[Chunk]) -> bool:
    """Return True if an answer of these chunks is guided."""
    return any(chunk.request.asked.guide is not None for chunk in drafting)


def allowed_guesses(drafting: Sequence[Chunk], guesses: mx.array) -> mx.array:
    """Return the guesses of these chunks' drafts with REFUSED in place of what grammars do not follow.

    Waits for the guesses, and for the masks after them.
    """
    ids = iter(read(guesses).tolist())
    drafts = [list(islice(ids, len(chunk.draft))) for chunk in drafting]
    guides = [chunk.request.asked.guide for chunk in drafting]
    for guide, draft in zip(guides, drafts, strict=True):
        if guide is not None and draft[0] != GUESS:
            guide.expect_now(list(takewhile(lambda token: token >= 0, draft)))
    for guide, draft in zip(guides, drafts, strict=True):
        if guide is not None:
            guide.mask()  # of all grammars, the first one that is waited for sends the guesses
            pairs = zip(draft, guide.foreseen, strict=False)
            num_allowed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            refused = draft[num_allowed:]
            draft[num_allowed:] = [GUESS if token == GUESS else REFUSED for token in refused]
    return mx.array([token for draft in drafts for token in draft], mx.int32)
