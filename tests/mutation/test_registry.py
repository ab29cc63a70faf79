"""Planted bugs in what Ollama's routes report of the registry; a test finds each."""

from __future__ import annotations

import pytest

from mlxserve.api.ollama.routes import Ollama
from mlxserve.api.ollama_models import OllamaModels
from tests.api.conftest import chat as chat
from tests.api.conftest import client as client
from tests.api.ollama import test_routes
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "claim an unload that is not done": Bug(
        Ollama,
        "_loaded",
        '"done_reason": "load", "warning"',
        '"warning"',
        test_routes.test_without_a_prompt_a_model_is_loaded_or_it_says_why_it_stays,
        {"path": "chat", "key": "message", "keep_alive": 0},
    ),
    "show the size of its files as a model's memory": Bug(
        OllamaModels,
        "_memory",
        "self._dispatch.memory(offered.model.name)",
        "offered.size",
        test_routes.test_the_loaded_model_never_expires_and_has_the_memory_that_is_planned,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_wrong_reply_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError,))
