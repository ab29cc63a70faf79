"""Sampling against numpy: which tokens are drawn, how often, and independently of neighbours."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.sampler import Draw, best_tokens, key_of, sample
from mlxserve.request import Guide, LiveRequest, Request, TokenLogprob

VOCABULARY = 12
LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 2.9, -9.0, 1.5, 0.5, 2.0, -1.0, 0.7], np.float32)


def draw(
    seed: int = 0,
    position: int = 5,
    *,
    prompt: tuple[int, ...] = (0,),
    outputs: tuple[int, ...] = (),
    lazy_index: int | None = None,
    guide: Guide | None = None,
    num_drafted: int = 0,
    **params: Any,
) -> Draw:
    request = LiveRequest(Request("r", prompt, SamplingParams(**params), guide=guide))
    request.token_ids.extend(outputs)
    return Draw(request, seed, position, lazy_index, num_drafted)


def tokens(
    logits: Any,
    draws: list[Draw],
    pending: list[int] | None = None,
    inputs: list[int] | None = None,
) -> list[int]:
    pending_ids, input_ids = (
        None if ids is None else mx.array(ids, mx.int32) for ids in (pending, inputs)
    )
    sampled = sample(mx.array(logits), draws, pending_ids, input_ids).read(draws)
    return [one.token_id for one in sampled]


def many(count: int, logits: np.ndarray = LOGITS, **params: Any) -> np.ndarray:
    draws = [draw(seed, **params) for seed in range(count)]
    return np.array(tokens(np.tile(logits, (count, 1)), draws))


def distribution(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution that `many` should draw from, in float64."""
    scaled = LOGITS.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = np.exp(scaled - scaled.max())
    kept[order[top_k or VOCABULARY :]] = 0
    kept /= kept.sum()
    before = np.cumsum(kept[order]) - kept[order]
    dropped = (before >= top_p) | (kept[order] < min_p * kept.max())
    kept[order[dropped]] = 0
    normal: np.ndarray = kept / kept.sum()
    return normal


# ---- what is drawn


def test_temperature_0_chooses_the_best_token() -> None:
    logits = np.random.default_rng(0).standard_normal((20, 300)).astype(np.float32)
    draws = [draw(seed, temperature=0, top_k=3, top_p=0.5) for seed in range(20)]
    assert tokens(logits, draws) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 0.001},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_numpy_says(params: dict[str, Any]) -> None:
    count, wanted = 4000, distribution(**params)
    found = np.bincount(many(count, **params), minlength=VOCABULARY)
    assert not found[wanted == 0].any(), "a token outside the support"
    # Chi-square over the tokens expected at least 5 times; the others form one class.
    often = wanted * count >= 5
    expected = np.append(wanted[often], wanted[~often].sum()) * count
    observed = np.append(found[often], found[~often].sum())
    possible = expected > 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = max(1, possible.sum() - 1)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 11, "min_p": 0.1},
        {"min_p": 0.05},
    ],
    ids=str,
)
def test_a_wide_vocabulary_has_the_same_distribution_as_a_sorted_one(
    params: dict[str, Any],
) -> None:
    """The best few are scattered among a thousand worse ones, which are never drawn."""
    places = np.random.default_rng(5).permutation(1100)[:VOCABULARY]
    wide = np.full(1100, -30.0, np.float32)
    wide[places] = LOGITS
    count, wanted = 2000, distribution(**params)
    found = np.bincount(many(count, wide, **params), minlength=1100)
    assert not found[places[wanted == 0]].any()
    assert found[places].sum() == count
    np.testing.assert_allclose(found[places], count * wanted, atol=4 * np.sqrt(count * 0.25))


@pytest.mark.parametrize("size", [1, 64, 1024])
def test_the_best_tokens_equal_those_of_a_full_sort(size: int) -> None:
    logits = np.random.default_rng(6).standard_normal((3, 2000)).astype(np.float32)
    expected = np.argsort(-logits, axis=-1)[:, :size]
    assert (np.array(best_tokens(mx.array(logits), size)) == expected).all()


def test_the_smallest_temperatures_choose_the_best_token() -> None:
    for temperature in [1e-4, 1e-30, 1e-44, 1e-300]:
        for filters in [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]:
            assert (many(50, temperature=temperature, **filters) == LOGITS.argmax()).all(), (
                temperature,
                filters,
            )


def test_a_top_k_beyond_any_vocabulary_keeps_all() -> None:
    same = many(300, top_k=VOCABULARY, top_p=0.99)
    assert (many(300, top_k=2**40, top_p=0.99) == same).all()


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = mx.array(LOGITS)[None].astype(mx.bfloat16)
    draws = [draw(3, logprobs=0)]
    rounded = logits.astype(mx.float32)
    assert sample(logits, draws).read(draws) == sample(rounded, draws).read(draws)


# ---- seeds


def mixed_draws() -> list[Draw]:
    return [
        draw(1, temperature=0),
        draw(2),
        draw(3, top_k=4),
        draw(4, temperature=0.7, top_p=0.8),
        draw(5, min_p=0.05, repetition_penalty=1.3, prompt=(1, 3)),
        draw(6, presence_penalty=2.0, outputs=(1, 1, 5)),
        draw(7, logit_bias={2: 9.0, 6: 12.0}),
        draw(8, logprobs=2),
        draw(9, temperature=1.5),
        draw(10, top_k=100, top_p=0.9),
        draw(11, top_p=0.95),
        draw(12, top_k=30, min_p=0.02),
        draw(13, temperature=1.1, top_k=30, top_p=0.9, min_p=0.01),
    ]


def test_a_row_gets_the_same_token_in_any_batch() -> None:
    draws = mixed_draws()
    size = len(draws)
    logits = np.random.default_rng(4).standard_normal((size, 200)).astype(np.float32) * 2
    alone = [tokens(logits[row : row + 1], [draws[row]])[0] for row in range(size)]
    assert tokens(logits, draws) == alone
    orders = [[4, 2], [1, 8, 3], [0, 6, 5], [9, 10, 11, 12], [2] * 32, [*range(size)] * 5]
    for order in (list(reversed(range(size))), *orders):
        assert tokens(logits[order], [draws[row] for row in order]) == [alone[row] for row in order]


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 30},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 1050},  # sorted as a whole
]


def test_rounding_that_swaps_neighbours_in_rank_changes_no_draw() -> None:
    """Pairs that differ by a millionth are swapped, none of them at a filter's bound."""
    for filters in FILTERS:
        values = np.repeat(np.linspace(-6, 3, 550, dtype=np.float32), 2)
        sign = np.tile(np.array([0, 1e-6], np.float32), 550)
        places = np.random.default_rng(7).permutation(1100)
        one, other = np.empty(1100, np.float32), np.empty(1100, np.float32)
        one[places], other[places] = values + sign, values - sign
        assert (np.argsort(one) != np.argsort(other)).sum() > 500, filters
        params = {"temperature": 1.1, **filters}
        assert (many(400, one, **params) == many(400, other, **params)).all(), filters


def test_a_token_that_a_narrower_filter_keeps_is_drawn_by_it_as_well() -> None:
    """The noise belongs to the token, whatever else is kept and however it is sorted."""
    logits = (np.random.default_rng(8).standard_normal(1500) * 2).astype(np.float32)
    by_rank = np.argsort(-logits)
    widest = many(300, logits)
    for top_k in (1500, 1024, 200, 64, 20, 5):
        kept = np.isin(widest, by_rank[:top_k])
        assert (many(300, logits, top_k=top_k)[kept] == widest[kept]).all()
        assert kept.sum() > 10


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    assert (many(200) == many(200)).all()


def test_seeds_and_positions_are_independent_of_one_another() -> None:
    logits = np.zeros((2000, 50), np.float32)
    rows = [draw(seed, position) for seed in range(40) for position in range(50)]
    found = np.array(tokens(logits, rows)).reshape(40, 50)
    counts = np.bincount(found.ravel(), minlength=50)
    assert ((counts - 40.0) ** 2 / 40).sum() < 49 + 5 * np.sqrt(98)
    same = [(found[:, 1:] == found[:, :-1]).mean(), (found[1:] == found[:-1]).mean()]
    same.append((found[1:, :-1] == found[:-1, 1:]).mean())
    assert max(same) < 0.04  # by chance: 0.02


def test_every_bit_of_a_seed_counts() -> None:
    logits = np.zeros((65, 10_000), np.float32)
    found = tokens(logits, [draw(0), *(draw(1 << bit) for bit in range(64))])
    assert len(set(found)) > 60
    keys = np.array([key_of(seed, 0) for seed in range(20_000)])
    assert len(np.unique(keys, axis=0)) == 20_000
    set_bits = np.unpackbits(keys.view(np.uint8), axis=1).mean(axis=0)
    assert np.abs(set_bits - 0.5).max() < 0.02


# ---- bias and penalties


def test_a_bias_is_added_before_sampling() -> None:
    draws = [
        draw(temperature=0, logit_bias={6: 100.0}),
        draw(temperature=0, logit_bias={1: -100.0, 5: -100.0}),
        draw(temperature=0),
        draw(top_k=1, logit_bias={2: 50.0}),
    ]
    assert tokens(np.tile(LOGITS, (4, 1)), draws) == [6, 3, 1, 2]


def penalised(logits: np.ndarray, draw: Draw, pending: list[int]) -> np.ndarray:
    """One row as the parameters are documented, in float64."""
    request, params, row = draw.request, draw.request.asked.params, logits.astype(np.float64)
    outputs = request.token_ids[request.num_prompt :]
    if draw.lazy_index is not None:
        outputs = [*outputs, pending[draw.lazy_index]]
    for token in {*request.token_ids, *outputs}:
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in outputs:
        row[token] -= params.frequency_penalty
    for token in set(outputs):
        row[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        row[token] += bias
    return row


def test_penalties_match_numpy_with_and_without_a_pending_token() -> None:
    rng = np.random.default_rng(11)
    logits = (rng.standard_normal((300, 20)) * 2).astype(np.float32)
    pending = rng.integers(0, 20, 40).tolist()
    draws = [
        draw(
            temperature=0,
            prompt=tuple(rng.integers(0, 20, 4).tolist()),
            outputs=tuple(rng.integers(0, 20, row % 7).tolist()),
            lazy_index=int(rng.integers(40)) if row % 3 else None,
            repetition_penalty=float(rng.choice([1.0, 0.5, 1.7])),
            presence_penalty=float(rng.choice([0.0, 1.5, -2.0])),
            frequency_penalty=float(rng.choice([0.0, 0.8, -0.5])),
            logit_bias={int(rng.integers(20)): 1.0} if row % 5 == 0 else {},
        )
        for row in range(300)
    ]
    expected = np.array([penalised(*pair, pending) for pair in zip(logits, draws, strict=True)])
    assert (expected.argmax(-1) != logits.argmax(-1)).sum() > 50, "penalties must change something"
    assert tokens(logits, draws, pending) == expected.argmax(-1).tolist()


def test_a_pending_token_counts_like_one_that_was_read() -> None:
    logits = np.tile(LOGITS, (2, 1))
    params: dict[str, Any] = {"temperature": 0, "frequency_penalty": 0.3}
    read = [draw(outputs=(1, 5, 1), **params), draw(outputs=(5,), **params)]
    lazy = [
        draw(outputs=(1, 5), lazy_index=2, **params),
        draw(outputs=(), lazy_index=0, **params),
    ]
    assert tokens(logits, lazy, pending=[5, 9, 1]) == tokens(logits, read)


# ---- logprobs


def test_logprobs_are_the_models_own_log_softmax() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((4, 500)) * 3).astype(np.float32)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    draws = [
        draw(1, logprobs=5, temperature=0.2),
        draw(2),
        draw(3, logprobs=0, temperature=0),
        draw(4, logprobs=20, top_k=2, logit_bias={7: 30.0}),
    ]
    sampled = sample(mx.array(logits), draws).read(draws)
    assert sampled[1].logprob is None
    for row, count in ((0, 5), (2, 0), (3, 20)):
        found = sampled[row].logprob
        assert isinstance(found, TokenLogprob)
        assert found.token_id == sampled[row].token_id
        assert found.logprob == pytest.approx(exact[row, found.token_id], abs=1e-4)
        best = np.argsort(-exact[row])[:count]
        assert [token for token, _ in found.top] == best.tolist()
        assert [value for _, value in found.top] == pytest.approx(exact[row, best], abs=1e-4)
    assert sampled[3].token_id == 7, "the bias moves the choice, not the reported probability"


def test_asking_for_more_alternatives_than_tokens_returns_all_tokens() -> None:
    draws = [draw(logprobs=20)]
    (found,) = sample(mx.array(LOGITS)[None], draws).read(draws)
    assert found.logprob is not None
    assert len(found.logprob.top) == VOCABULARY


# ---- min_tokens


def test_no_token_that_ends_an_answer_is_chosen_before_its_minimum() -> None:
    for params in [{"temperature": 0}, {"temperature": 1e-6}, {"top_k": 3}, {"top_p": 0.9}, {}]:
        ends = {"stop_token_ids": (1,), "min_tokens": 3, **params}
        early = [draw(seed, 1 + seed % 3, **ends) for seed in range(60)]  # of one token of prompt
        late = [draw(seed, 4, **ends) for seed in range(60)]
        chosen = tokens(np.tile(LOGITS, (120, 1)), [*early, *late])
        assert 1 not in chosen[:60], params
        assert 1 in chosen[60:], params


def test_the_minimum_holds_for_a_token_whose_predecessor_is_unread() -> None:
    logits = np.tile(LOGITS, (2, 1))
    ends = {"stop_token_ids": (1,), "min_tokens": 3, "temperature": 0}
    third = draw(position=3, outputs=(3,), lazy_index=0, **ends)
    fourth = draw(position=4, outputs=(3, 5), lazy_index=1, **ends)
    assert tokens(logits, [third, fourth], pending=[5, 5]) == [5, 1]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_penalties_count_the_tokens_of_a_draft_before_a_row(temperature: float) -> None:
    params = {
        "temperature": temperature,
        "frequency_penalty": 1.1,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.4,
    }
    history, drafted = (3, 5, 5), (1, 1, 2)
    rng = np.random.default_rng(3)
    for seed in range(20):
        logits = rng.normal(size=(4, VOCABULARY)).astype(np.float32)
        alone = [
            tokens(
                logits[row][None],
                [draw(seed, 4 + row, outputs=(*history, *drafted[:row]), **params)],
            )[0]
            for row in range(4)
        ]
        rows = [draw(seed, 4 + row, outputs=history, num_drafted=row, **params) for row in range(4)]
        other = draw(seed)
        found = tokens(
            np.stack([LOGITS, *logits]), [other, *rows], inputs=[9, history[-1], *drafted]
        )
        assert found[1:] == alone


# ---- guides


class Allows:
    """A guide that allows the given tokens."""

    error: str | None = None
    must_wait = is_ready = True
    can_follow = is_free = False

    def __init__(self, *tokens: int, size: int = VOCABULARY) -> None:
        self.num_read = 0
        self._mask = sum(1 << token for token in tokens).to_bytes(-(-size // 32) * 4, "little")

    def read(self, token_ids: Any, /) -> None:
        self.num_read += len(token_ids)

    def expect(self, likely: Any, /) -> None:
        """It foresees nothing but what a test says."""

    def ask(self) -> None:
        """The mask is known."""

    def wait(self, seconds: float, /) -> None:
        """The mask is known."""

    def foresee(self, num_tokens: int, /) -> None:
        """It forces nothing but what a test says."""

    @property
    def foreseen(self) -> tuple[int, ...]:
        return ()

    def mask(self, num_foreseen: int = 0, /) -> bytes:
        return self._mask


class Forces(Allows):
    """A guide that forces tokens, and then allows one more."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(tokens[0])
        self._tokens = tokens

    @property
    def foreseen(self) -> tuple[int, ...]:
        return self._tokens[:-1]

    def mask(self, num_foreseen: int = 0, /) -> bytes:
        return Allows(self._tokens[num_foreseen]).mask()


def test_each_row_of_a_draft_has_the_mask_after_the_tokens_before_it() -> None:
    guide = Forces(6, 2, 9)
    draws = [guided(guide, temperature=0, num_drafted=number) for number in range(3)]
    assert tokens(np.tile(LOGITS, (3, 1)), draws, inputs=[4, 6, 2]) == [6, 2, 9]


def guided(guide: Allows, **params: Any) -> Draw:
    return draw(outputs=(3, 4), guide=guide, **params)


def test_a_guide_constrains_its_own_row_only() -> None:
    for params in [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.1}, {"logit_bias": {1: 1e4}}]:
        logits = np.tile(LOGITS, (3, 1))
        alone = tokens(LOGITS[None], [draw(9, **params)])[0]
        draws = [guided(Allows(6)), draw(9, **params), guided(Allows(2, 6), **params)]
        first, second, third = tokens(logits, draws)
        assert first == 6, params
        assert second == alone, params
        assert third in (2, 6), params
        assert draws[0].request.asked.guide.num_read == 2, params  # type: ignore[union-attr]


def test_a_greedy_guided_row_gets_the_best_allowed_token() -> None:
    assert tokens(LOGITS[None], [guided(Allows(2, 9, 6), temperature=0)]) == [9]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_structure_that_is_complete_ends_before_the_minimum(temperature: float) -> None:
    params = {"stop_token_ids": (6,), "min_tokens": 9, "temperature": temperature}
    assert tokens(LOGITS[None], [guided(Allows(6), **params)]) == [6]
    assert tokens(LOGITS[None], [guided(Allows(6, 2), **params)]) == [2]


def test_logprobs_of_a_guided_row_ignore_the_mask() -> None:
    draws = [guided(Allows(6), temperature=0, logprobs=1)]
    [sampled] = sample(mx.array(LOGITS[None]), draws).read(draws)
    assert sampled.logprob is not None
    expected = LOGITS[6] - np.log(np.exp(LOGITS).sum())
    assert sampled.logprob.logprob == pytest.approx(expected, abs=1e-4)
    assert sampled.logprob.top[0][0] == 1


@pytest.mark.parametrize("size", [5, 70])
def test_a_mask_may_be_shorter_or_longer_than_the_vocabulary(size: int) -> None:
    vocabulary = np.zeros((1, 40), np.float32)
    vocabulary[0, 39] = 9.0
    assert tokens(vocabulary, [guided(Allows(3, size=size), temperature=0)]) == [3]


def test_a_lazy_row_is_not_guided() -> None:
    lazy = draw(outputs=(3,), guide=Allows(6), temperature=0, lazy_index=0)
    assert tokens(LOGITS[None], [lazy], pending=[4]) == [1]
