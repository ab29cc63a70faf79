"""Vercel's AI SDK with each of its providers for servers like this one, whole and streamed.

It comes from npm, beside the agents, and needs Node 22:

    npm install --prefix clients ai @ai-sdk/openai-compatible @ai-sdk/anthropic @ai-sdk/openai
    PATH=$PWD/clients/node_modules/.bin:$PATH uv run pytest -m clients
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agent_server import Answer, agent_server, call, num_results
from tests.clients.node_packages import package_folder, run_node
from tests.clients.odd_answers import DONE, QUESTIONS, marker_text, odd_answer
from tests.text.template_rules import GUARDS

pytestmark = pytest.mark.clients

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")
PACKAGES = ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@ai-sdk/openai")
NUM_WAYS = 8  # four providers, whole and streamed
RAIN = "Is there rain in Rome?"


def outcomes(
    folder: Path, rule: str, answer: Answer, questions: Sequence[str]
) -> list[dict[str, Any]]:
    """What each provider makes, in each way, of the answer to each question."""
    packages = package_folder(*PACKAGES)
    # Node looks for modules beside the script.
    (folder / "node_modules").symlink_to(packages)
    script = shutil.copy(SCRIPT, folder)
    with agent_server(folder, rule, answer) as server:
        found: list[dict[str, Any]] = run_node(
            ["--no-warnings", str(script), server.url, json.dumps(questions)]
        )
    assert len(found) == NUM_WAYS * len(questions)
    return found


@pytest.mark.parametrize("rule", GUARDS)
def test_every_provider_finishes_a_tool_loop(rule: str, model: Path) -> None:
    def answer(prompt: str) -> str:
        return "Yes, there is rain." if num_results(prompt) else call("weather", city="Rome")

    for outcome in outcomes(model, rule, answer, [RAIN]):
        assert outcome["text"] == "Yes, there is rain.", outcome
        assert (outcome["steps"], outcome["calls"]) == (2, 1), outcome
        assert not outcome.get("errors"), outcome


def test_no_provider_raises_for_an_odd_answer(model: Path) -> None:
    for outcome in outcomes(model, "qwen 3.5", odd_answer, QUESTIONS):
        assert not outcome.get("errors"), outcome
        text = marker_text(outcome["prompt"])
        if text is not None:
            assert (outcome["text"], outcome["calls"]) == (text, 0), outcome
        else:
            assert outcome["calls"] == 0 or outcome["text"] == DONE, outcome
