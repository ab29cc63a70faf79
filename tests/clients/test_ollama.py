"""Ollama's package for JavaScript as a program, with the rules of four public templates.

It comes from npm, beside the agents:

    npm install --prefix clients ollama
    PATH=$PWD/clients/node_modules/.bin:$PATH uv run pytest -m clients
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.ollama_models import OLLAMA_VERSION
from tests.clients.agent_server import agent_server, call, num_results
from tests.clients.node_packages import package_folder, run_node
from tests.text.template_rules import GUARDS

pytestmark = pytest.mark.clients

SCRIPT = """
const { Ollama } = require("ollama");
const client = new Ollama({ host: process.argv[1] });
const model = "local";
const parameters = { type: "object", required: ["city"], properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", description: "Tells it.", parameters } }];
const messages = [{ role: "user", content: "Is there rain in Rome?" }];

async function chat() {
  const calls = [];
  let last;
  for await (const part of await client.chat({ model, messages, tools, stream: true })) {
    calls.push(...(part.message.tool_calls ?? []));
    last = part;
  }
  messages.push({ role: "assistant", content: "", tool_calls: calls });
  for (const made of calls) {
    const content = `rain in ${made.function.arguments.city}`;
    messages.push({ role: "tool", tool_name: made.function.name, content });
  }
  const answer = await client.chat({ model, messages, tools, options: { temperature: 0 } });
  return { calls: calls.length, done: last.done, answer: answer.message.content };
}

async function refused() {
  try {
    await client.chat({ model: "other", messages });
  } catch (error) {
    return [error.name, error.status_code, error.error];
  }
}

async function main() {
  const listed = (await client.list()).models.map((one) => one.name);
  const shown = (await client.show({ model })).capabilities;
  const { version } = await client.version();
  const raw = (await client.generate({ model, prompt: "Once", raw: true })).response;
  console.log(JSON.stringify({ listed, shown, version, raw, chat: await chat(), refused: await refused() }));
}

main();
"""


@pytest.mark.parametrize("rule", GUARDS)
def test_the_package_lists_chats_calls_and_is_refused(rule: str, tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        if "Rome" not in prompt:
            return "upon a time"
        return "Yes, there is rain." if num_results(prompt) else call("weather", city="Rome")

    with agent_server(tmp_path, rule, answer) as server:
        said: dict[str, Any] = run_node(
            ["-e", SCRIPT, server.url], {"NODE_PATH": str(package_folder("ollama"))}
        )
    assert said["listed"] == ["local:latest"]
    assert {"completion", "tools"} <= {*said["shown"]}
    assert said["version"] == OLLAMA_VERSION
    assert said["raw"] == "upon a time"
    assert said["chat"] == {"calls": 1, "done": True, "answer": "Yes, there is rain."}
    assert said["refused"][:2] == ["ResponseError", 404]
    assert said["refused"][2].startswith("model 'other' not found")
    assert "rain in Rome" in server.prompts[-1]
