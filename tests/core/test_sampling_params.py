"""Sampling parameters are validated once, when they are constructed, and errors name them."""

from __future__ import annotations

import math

import pytest

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind

NAN, INF = math.nan, math.inf
NO_NUMBERS = ("1", None, True, [1], NAN, INF, -INF, 1j)
BAD: dict[str, tuple[object, ...]] = {
    "n": (0, -1, 129, 1.0, "2", True, None),
    "max_tokens": (0, -1, 1.0, "5", True, NAN),
    "min_tokens": (-1, 1.0, "5", True, None),
    "temperature": (*NO_NUMBERS, -0.1, 100.1),
    "top_p": (*NO_NUMBERS, 0, 0.0, -0.5, 1.01),
    "top_k": (-1, 1.5, "1", None, True, NAN),
    "min_p": (*NO_NUMBERS, -0.01, 1.01),
    "seed": (1.0, "1", True, NAN, 2**64, -(2**63) - 1),
    "stop": (3, None, [""], ["a", ""], ["a", 3], "", ["x"] * 17, {"a"}, [b"a"]),
    "stop_token_ids": (3, None, "12", b"12", [1.0], ["1"], [True], [-1], [2**31], {1}),
    "repetition_penalty": (*NO_NUMBERS, 0, 0.009, -1.0, 101),
    "presence_penalty": (*NO_NUMBERS, -100.1, 100.1),
    "frequency_penalty": (*NO_NUMBERS, -100.1, 100.1),
    "logit_bias": (
        3,
        None,
        "ab",
        {"1": 1.0},
        {-1: 1.0},
        {2**31: 1.0},
        {1: "x"},
        {1: None},
        {1: NAN},
        {1: 10_001.0},
        {True: 1.0},
        [1],
    ),
    "logprobs": (-1, 21, 1.0, "1", True),
    "ignore_eos": ("yes", 1, None),
    "stop_on_repetition": ("yes", 1, None),
    "structure": ("json_object", {"type": "object"}),
}
GOOD: dict[str, tuple[object, ...]] = {
    "n": (1, 128),
    "max_tokens": (None, 1, 2**40),
    "min_tokens": (0, 1, 2**40),
    "temperature": (0, 0.0, 1e-300, 2, 100),
    "top_p": (1e-9, 0.5, 1, 1.0),
    "top_k": (0, 1, 2**40),
    "min_p": (0, 0.5, 1.0),
    "seed": (None, 0, -1, -(2**63), 2**64 - 1),
    "stop": ((), ["a"], ("a", "bc"), ["x"] * 16),
    "stop_token_ids": ((), [0], (1, 2**31 - 1), range(3)),
    "repetition_penalty": (0.01, 1, 100.0),
    "presence_penalty": (-100, 0.5, 100),
    "frequency_penalty": (-100, 0.5, 100),
    "logit_bias": ({}, {0: 1}, {2**31 - 1: -1e4}),
    "logprobs": (None, 0, 20),
    "ignore_eos": (True, False),
    "stop_on_repetition": (True, False),
    "structure": (None, Structure(StructureKind.JSON_OBJECT)),
}


def each(table: dict[str, tuple[object, ...]]) -> list[tuple[str, object]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_each_choice_has_its_own_seed_and_always_the_same() -> None:
    params = SamplingParams(n=3, seed=2**64 - 2, top_k=5)
    assert [choice.seed for choice in params.choices()] == [2**64 - 2, 2**64 - 1, 0]
    assert {(choice.n, choice.top_k) for choice in params.choices()} == {(1, 5)}
    assert SamplingParams(n=2).choices() == [SamplingParams()] * 2


def test_the_tables_below_name_every_parameter() -> None:
    names = set(SamplingParams.__dataclass_fields__)
    assert set(BAD) == names
    assert set(GOOD) == names


def test_a_bad_value_is_refused_by_the_parameters_name() -> None:
    for name, value in each(BAD):
        with pytest.raises(InvalidParameter) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert caught.value.name == name, (name, value)
        assert str(caught.value).startswith(f"{name}: "), (name, value)
        assert "\n" not in str(caught.value), (name, value)


def test_a_good_value_is_kept() -> None:
    for name, value in each(GOOD):
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert getattr(params, name) == value, (name, value)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_a_bad_parameter_is_a_bad_request_and_a_value_error() -> None:
    assert issubclass(InvalidParameter, InvalidRequest)
    assert issubclass(InvalidParameter, ValueError)


def test_parameters_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1, 0.5)  # type: ignore[call-arg]


def test_a_structure_needs_an_end() -> None:
    with pytest.raises(InvalidParameter, match="ignore_eos: cannot be combined with structure"):
        SamplingParams(structure=Structure(StructureKind.JSON_OBJECT), ignore_eos=True)


def test_the_minimum_is_at_most_the_maximum() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(
        InvalidParameter, match=r"min_tokens: must be at most max_tokens \(4\), got 5"
    ):
        SamplingParams(min_tokens=5, max_tokens=4)
