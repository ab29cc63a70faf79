"""Which models are recommended on Macs: those that were measured as usable there."""

from __future__ import annotations

import pytest

from mlxserve.core.config import SchedulerConfig
from mlxserve.hub import recommendation
from mlxserve.hub.catalog import memory_fit, well_known
from mlxserve.hub.known_models import known_models
from mlxserve.hub.recommendation import CONTEXT, Recommendation
from mlxserve.system.device_memory import MemoryLimit
from tests.memory_table import mac


@pytest.mark.parametrize(
    ("memory", "best", "faster"),
    [
        (8, "lfm2.5:2.6b", "lfm2.5:1.2b"),
        (16, "qwen3.5:4b", "lfm2.5:1.2b"),
        (18, "qwen3.5:9b", "qwen3.5:4b"),
        (24, "bonsai:27b", "qwen3.5:4b"),
        (32, "qwen3.8:27b", "qwen3.5:4b"),
        (48, "qwen3.8:27b", "qwen3.6:35b"),
        (128, "qwen3.8:27b", "qwen3.6:35b"),
    ],
)
def test_a_mac_is_offered_what_was_measured_as_usable_there(
    memory: int, best: str, faster: str
) -> None:
    suited = recommendation.recommend(mac(memory).limit(), is_metal=True)
    assert suited.best is not None
    assert suited.faster is not None
    names = [known_models()[name].names[0] for name in (suited.best, suited.faster)]
    assert names == [best, faster]


@pytest.mark.parametrize("memory", [8, 16, 24, 32, 64, 512])
def test_all_that_is_recommended_fits_with_16k_beside_other_programs(memory: int) -> None:
    limit = mac(memory).limit()
    suited = recommendation.recommend(limit, is_metal=True)
    entries = {entry.name: entry for entry in well_known()}
    options = SchedulerConfig(max_model_len=CONTEXT)
    for name in filter(None, (suited.best, suited.faster, *suited.others)):
        fit = memory_fit(entries[name], memory=limit, is_metal=True, options=options)
        assert fit.fits
        assert limit.total - fit.needed >= min(14_000_000_000, limit.total * 5 / 8)
        assert not known_models()[name].is_earlier


def test_other_families_are_named_once() -> None:
    suited = recommendation.recommend(mac(64).limit(), is_metal=True)
    families = [known_models()[name].names[0].partition(":")[0] for name in suited.others]
    assert len(set(families)) == len(families) > 5
    assert {"qwen3.8", "qwen3.6"}.isdisjoint(families), "those of the best and the faster one"


def test_nothing_suits_a_machine_without_memory() -> None:
    assert (
        recommendation.recommend(MemoryLimit(10**9, total=2 * 10**9), is_metal=True)
        == Recommendation()
    )


def test_keys_and_values_in_8_bits_leave_room() -> None:
    limit = MemoryLimit(6_500_000_000, total=64 * 10**9)
    plain = recommendation.recommend(limit, is_metal=True)
    quantised = recommendation.recommend(limit, is_metal=True, in_8_bits=True)
    order = list(known_models())
    assert plain.best is not None
    assert quantised.best is not None
    assert order.index(quantised.best) <= order.index(plain.best)
    assert len(quantised.others) >= len(plain.others)
