"""The probe of a head at load: how many of its guesses at a fixed text are what the model says itself.

A head is easily loaded wrongly, and is then only slow: norms stored minus one that are taken as they are accept
nothing at four times the cost (d-inference #774). So it guesses at 32 tokens before it may draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import read
from mlxserve.model.drafting.head_model import HeadModel
from mlxserve.model.load import LoadedModel

NUM_GUESSES = 32
MIN_SHARE = 0.1
# Plain prose, of which any model that can read predicts most words; about 90 tokens.
TEXT = (
    "The water cycle describes how water moves above, on and below the surface of the Earth. The sun heats the "
    "water in the oceans, and some of it evaporates into the air. The vapour rises, cools and forms clouds. When "
    "the drops in the clouds become too heavy, they fall to the ground as rain or snow. The water then flows into "
    "rivers and lakes, and at the end back into the oceans, where the cycle begins again."
)


def share_accepted(head: HeadModel, target: LoadedModel, token_ids: Sequence[int]) -> float:
    """Return the share of a head's guesses at the last tokens of a text that are the model's own best tokens.

    Raises what the definitions raise, and AssertionError for a model that does not show its hidden states.
    """
    tokens = mx.array([list(token_ids)])
    with target.selector.capturing(before_norm=not head.takes_normed) as captured:
        own = target.model(tokens, cache=make_prompt_cache(target.model))[0]
    assert captured, "the model's head is not called by its name"
    [hidden] = [each.reshape(-1, each.shape[-1]) for each in captured]
    before = mx.concatenate([mx.zeros_like(hidden[:1]), hidden[:-1]])
    with head.showing(before):
        guesses = head(tokens, cache=make_prompt_cache(head))[0]
    right = mx.argmax(guesses, axis=-1) == mx.argmax(own, axis=-1)
    # What is no number has no best token.
    right = right & mx.all(mx.isfinite(guesses), axis=-1)
    return float(read(right[-NUM_GUESSES:]).mean())
