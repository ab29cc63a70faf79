"""Each curve measures what it names, and ends with its exponent."""

from __future__ import annotations

import pytest

from tests.perf import growth
from tests.perf.growth import Curve


def curve(*costs: float) -> Curve:
    sizes = (1, 10, 100)[: len(costs)]
    return Curve("cost of {}", "s", sizes, tuple((cost / 2, cost, 9 * cost) for cost in costs))


@pytest.mark.parametrize(
    ("costs", "exponent"), [((5, 5, 5), 0), ((1, 10, 100), 1), ((5, 5, 500), 2)]
)
def test_the_exponent_is_that_of_the_last_sizes(costs: tuple[float, ...], exponent: float) -> None:
    assert curve(*costs).exponent() == pytest.approx(exponent)


def test_a_curve_has_a_figure_per_size_and_one_for_its_growth() -> None:
    figures = curve(1, 2).figures()
    assert [figure.name.strip() for figure in figures] == [
        "cost of 1",
        "cost of 10",
        "exponent of growth at the end",
    ]
    assert [figure.values for figure in figures[:2]] == [(0.5, 1, 9), (1, 2, 18)]


def test_measurements_are_interleaved_and_the_first_ones_warm_up() -> None:
    seen: list[int] = []

    def measure(size: int) -> float:
        seen.append(size)
        return float(len(seen))

    assert growth.interleaved((7, 8), measure, rounds=2) == ((3, 5), (4, 6))
    assert seen == [7, 8] * 3


def test_sessions_hold_their_shared_pages_once() -> None:
    shared = growth.PREFIX // growth.PAGE_SIZE
    own = growth.OWN // growth.PAGE_SIZE
    assert growth.pages_of_sessions(1) == shared + own
    assert growth.pages_of_sessions(16) == shared + 16 * own


@pytest.mark.parametrize("make", [growth.cached_prompt, growth.cached_chat])
def test_an_admission_can_be_measured_again_and_again(make) -> None:  # type: ignore[no-untyped-def]
    admit = make(512)
    assert all(admit() > 0 for _ in range(3))


def test_steps_of_the_embedded_model_have_a_time_for_each_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "RUNNING", (1, 2))
    monkeypatch.setattr(growth, "CONTEXTS", (32, 64, 1 << 20))
    over_running, over_context = growth.step_curves("mlxserve-mini", rounds=2)
    assert over_running.sizes == (1, 2)
    assert over_context.sizes == (32, 64)  # the model supports no more
    for steps in (over_running, over_context):
        assert [len(values) for values in steps.values] == [2, 2]
        assert min(map(min, steps.values)) > 0
