"""The catalogue and what is recommended from it: each wrong rule is found by a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxserve.core.errors import MlxServeError
from mlxserve.hub import catalog, known_models, recommendation
from tests.hub import test_catalogue, test_known_models, test_recommendation
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

TABLE = test_recommendation.test_a_mac_is_offered_what_was_measured_as_usable_there
FITS = test_recommendation.test_all_that_is_recommended_fits_with_16k_beside_other_programs

FOUND: dict[str, Bug] = {
    "leave nothing to other programs": Bug(
        recommendation,
        "recommend",
        "memory.total - others",
        "memory.total",
        TABLE,
        {"memory": 16, "best": "qwen3.5:4b", "faster": "lfm2.5:1.2b"},
    ),
    "leave five eighths of a large machine": Bug(
        recommendation,
        "recommend",
        "min(_MAX_OF_OTHERS, int(memory.total * _SHARE_OF_OTHERS))",
        "int(memory.total * _SHARE_OF_OTHERS)",
        TABLE,
        {"memory": 32, "best": "qwen3.8:27b", "faster": "qwen3.5:4b"},
    ),
    "judge by another context": Bug(
        recommendation,
        "recommend",
        "max_model_len=CONTEXT",
        "max_model_len=64",
        FITS,
        {"memory": 16},
    ),
    "call the next one faster": Bug(
        recommendation,
        "recommend",
        "if model.is_fast",
        "if model",
        TABLE,
        {"memory": 24, "best": "bonsai:27b", "faster": "qwen3.5:4b"},
    ),
    "recommend models of earlier years": Bug(
        recommendation, "_writers", " and not model.is_earlier", "", FITS, {"memory": 64}
    ),
    "name a family twice": Bug(
        recommendation,
        "recommend",
        "shown.add(_family(model))",
        "pass",
        test_recommendation.test_other_families_are_named_once,
    ),
    "forget what a row says of heads": Bug(
        catalog,
        "_suggestion",
        "has_head=model.has_head",
        "has_head=False",
        test_catalogue.test_every_model_that_writes_is_an_entry_with_the_facts_of_its_row,
    ),
    "find a size within another": Bug(
        known_models,
        "_is_named",
        "if not word[0].isdigit():",
        "if word:",
        test_known_models.test_words_find_known_models_best_first,
    ),
}


@pytest.fixture(autouse=True)
def read_again() -> Iterator[None]:
    """Entries that were read before would hide a planted bug, and those of the bug would stay."""
    catalog.well_known.cache_clear()
    yield
    catalog.well_known.cache_clear()


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_of_the_catalogue_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, MlxServeError))
