"""The probe of a head at load: how many of its guesses at a fixed text are what the model says itself.

A head is easily loaded wrongly, and is then only slow: norms stored minus one that are taken as they are accept
nothing at four times the cost (d-inference #774). So it guesses at 32 tokens before it may draft.

Among several ranks rank 0 has the head, and all ranks compute the model's part of the probe once (`read_text`,
`help_to_read`): rank 0 sends the tokens, or none if it has no head. So is an assistant tried (`assistant_probe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import evaluate, read
from mlxserve.model.drafting.head_model import HeadModel
from mlxserve.model.load import LoadedModel
from mlxserve.model.rank_group import RankGroup

NUM_GUESSES = 32
MIN_SHARE = 0.1
# Plain prose, of which any model that can read predicts most words; about 90 tokens.
TEXT = (
    "The water cycle describes how water moves above, on and below the surface of the Earth. The sun heats the "
    "water in the oceans, and some of it evaporates into the air. The vapour rises, cools and forms clouds. When "
    "the drops in the clouds become too heavy, they fall to the ground as rain or snow. The water then flows into "
    "rivers and lakes, and at the end back into the oceans, where the cycle begins again."
)


class ReadText(NamedTuple):
    """Holds what a model computes of a text.

    tokens  (1, T)
    best    (T,): its own best next tokens
    hidden  (T, size): the hidden states that a head is given
    """

    tokens: mx.array
    best: mx.array
    hidden: mx.array


def read_text(target: LoadedModel, token_ids: Sequence[int], *, takes_normed: bool) -> ReadText:
    """Compute a text, on rank 0 of several with the others.

    takes_normed: the head is given hidden states after the last norm
    Raises what the definitions raise, and AssertionError for a model that does not show its hidden states.
    """
    if target.group is not None:
        send_text(target.group, token_ids)
    tokens = mx.array([list(token_ids)])
    with target.selector.capturing(before_norm=not takes_normed) as captured:
        own = target.model(tokens, cache=make_prompt_cache(target.model))[0]
    assert captured, "the model's head is not called by its name"
    [hidden] = [each.reshape(-1, each.shape[-1]) for each in captured]
    found = ReadText(tokens, mx.argmax(own, axis=-1), hidden)
    evaluate(*found)
    return found


def help_to_read(target: LoadedModel) -> None:
    """Compute this rank's part of the text that rank 0 reads, if it reads one."""
    assert target.group is not None
    if token_ids := send_text(target.group, ()):
        tokens = mx.array([token_ids])
        evaluate(target.model(tokens, cache=make_prompt_cache(target.model)))


def read_nothing(group: RankGroup) -> None:
    """Tell the other ranks that there is no head."""
    send_text(group, ())


def send_text(group: RankGroup, token_ids: Sequence[int]) -> list[int]:
    """Return rank 0's text on each rank; a collective call, before the model is called."""
    [length] = group.from_lead([len(token_ids)])
    return group.from_lead([*token_ids] or [0] * length) if length else []


def share_accepted(head: HeadModel, text: ReadText) -> float:
    """Return the share of a head's guesses at the last tokens of a text that are the model's own best tokens.

    Raises what the definitions raise.
    """
    before = mx.concatenate([mx.zeros_like(text.hidden[:1]), text.hidden[:-1]])
    with head.showing(before):
        guesses = head(text.tokens, cache=make_prompt_cache(head))[0]
    right = mx.argmax(guesses, axis=-1) == text.best
    # What is no number has no best token.
    right = right & mx.all(mx.isfinite(guesses), axis=-1)
    return float(read(right[-NUM_GUESSES:]).mean())
