"""Ollama's package for JavaScript as a program, with the rules of four public templates.

It comes from npm, beside the agents:

    npm install --prefix clients ollama
    PATH=$PWD/clients/node_modules/.bin:$PATH uv run pytest -m clients
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.ollama_models import OLLAMA_VERSION
from tests.clients.agent_server import agent_server, call, num_results
from tests.clients.node_packages import package_folder, run_node
from tests.clients.odd_answers import DONE, QUESTIONS, marker_text, odd_answer
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

ODD_SCRIPT = """
const { Ollama } = require("ollama");
const [url, questions] = process.argv.slice(1);
const client = new Ollama({ host: url });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", description: "Tells it.", parameters } }];

async function main() {
  const outcomes = [];
  for (const content of JSON.parse(questions)) {
    const messages = [{ role: "user", content }];
    const whole = (await client.chat({ model: "local", messages, tools })).message;
    const streamed = { content: "", calls: [] };
    for await (const part of await client.chat({ model: "local", messages, tools, stream: true })) {
      streamed.content += part.message.content;
      streamed.calls.push(...(part.message.tool_calls ?? []));
    }
    const after = { role: "tool", tool_name: "weather", content: "rain" };
    const again = whole.tool_calls ? [...messages, whole, after] : messages;
    const last = (await client.chat({ model: "local", messages: again, tools })).message.content;
    outcomes.push({ content: whole.content, calls: whole.tool_calls ?? [], streamed, last });
  }
  console.log(JSON.stringify(outcomes));
}

main();
"""


def test_the_package_reads_every_odd_answer_whole_and_streamed(tmp_path: Path) -> None:
    with agent_server(tmp_path, "qwen 3.5", odd_answer) as server:
        outcomes: list[dict[str, Any]] = run_node(
            ["-e", ODD_SCRIPT, server.url, json.dumps(QUESTIONS)],
            {"NODE_PATH": str(package_folder("ollama"))},
        )
    for question, outcome in zip(QUESTIONS, outcomes, strict=True):
        streamed = outcome["streamed"]
        assert streamed["content"] == outcome["content"], outcome
        # Ids differ from answer to answer.
        functions = [[call["function"] for call in each["calls"]] for each in (streamed, outcome)]
        assert functions[0] == functions[1], outcome
        text = marker_text(question)
        assert outcome["content"] == (text or outcome["content"]), outcome
        assert outcome["calls"] == [] or outcome["last"] == DONE, outcome


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
