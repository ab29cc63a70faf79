"""Public chat templates: every shape of history that agents send is rendered, and loses no text."""

from __future__ import annotations

import pytest

from mlxserve.text.conversation import Conversation, completed_tool
from mlxserve.text.probes import Probe, Tools
from mlxserve.text.template_caps import find_abilities
from mlxserve.text.template_compat import Fitting
from tests.templates.public_templates import MISSING, rendering, templates
from tests.text.rendering import worker
from tests.text.test_template_compat import SHAPES, TOOLS, marks

pytestmark = pytest.mark.templates

# They raise for any conversation, or for any with usual tools.
ODD = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "wants a description of every parameter",
    "fireworks-ai-llama-3-firefunction-v2": "wants tools as a text named `functions`",
    "llama-cpp-deepseek-r1": "gives tojson a generator, which llama.cpp's renderer takes and jinja2 does not",
}


@pytest.mark.parametrize("name", templates() or [pytest.param("", marks=pytest.mark.skip(MISSING))])
def test_every_shape_of_a_history_is_rendered_whole(name: str) -> None:
    if name in ODD:
        pytest.skip(ODD[name])
    render_each = rendering(templates()[name])
    fitting = Fitting(find_abilities(render_each, worker().variables(templates()[name])))
    no_tools: Tools | None = None if fitting.abilities.without_tools else []
    for shape, messages in SHAPES.items():
        fitted = fitting.fit(Conversation.from_messages(messages))
        some_tools = [completed_tool(tool) for tool in TOOLS]
        for tools in (some_tools, no_tools):
            [text] = render_each([Probe(fitted.messages, tools)])
            assert text is not None, (shape, fitted.changes)
            assert all(mark in text for mark in marks(messages)), (shape, fitted.changes)
