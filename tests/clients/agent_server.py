"""The product's API over a template with the rules of a public one, and answers from a script."""

from __future__ import annotations

import contextlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.chat.image_prompts import ImagePrompts
from mlxserve.chat.language_model import language_model
from mlxserve.core.errors import PromptTooLong
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.output_stream import OutputStream
from mlxserve.hub.embedded import model_path
from mlxserve.images.image import Image
from mlxserve.images.picture import Picture
from mlxserve.request import Output
from mlxserve.text.tokenizer import Tokenizer
from tests.api.scripted_engine import ScriptedEngine
from tests.api.serving import serving
from tests.text.effort_rules import EFFORT_RULES
from tests.text.template_rules import GUARDS

Answer = Callable[[str], str | None]  # the answer to a prompt; None: it is too long
# The included model's template writes contents as texts; a model that sees has its parts, too.
_PARTS = """{%- macro said(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content or [] -%}{{ part.text if part.type == 'text' else '<|endoftext|>' }}{%- endfor -%}
{%- endif -%}{%- endmacro -%}"""


class Unfinished(str):
    """The beginning of an answer that ends only when the client leaves."""

    __slots__ = ()


def call(name: str, **arguments: Any) -> str:
    """A call as the included model's template has it."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def num_results(prompt: str) -> int:
    """Results of tools in a prompt."""
    return prompt.count("</tool_response>")


class AgentEngine(ScriptedEngine):
    """Says what a function of the prompt says."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, context: int) -> None:
        super().__init__(tokenizer)
        self.max_model_len = context
        self.prompts: list[str] = []
        self.num_refused = 0
        self.num_unfinished = 0
        self._answer = answer
        self._text_of = tokenizer.decode
        self._encode = tokenizer.encode

    async def see(self, request: Any) -> None:
        """Real engines compute the rows of the prompt's images."""

    async def submit(self, requests: Sequence[Any]) -> Any:
        for request in requests:
            prompt = self._text_of(request.token_ids)
            said = self._answer(prompt)
            if said is None:
                self.num_refused += 1
                raise PromptTooLong.for_answer(self.max_model_len + 1_000, self.max_model_len)
            self.prompts.append(prompt)
            self.says = said
            if isinstance(said, Unfinished):
                return self._begun(request)
        return await super().submit(requests)

    def _begun(self, request: Any) -> OutputStream:
        stream = OutputStream(self, [request])
        said = tuple(self._encode(self.says))
        stream.deliver(Output(request.id, said, num_prompt=request.num_prompt))
        self.num_unfinished += 1
        return stream


class SizeReader:
    """A model's reader of images, which shows their size as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        [self.placeholder] = tokenizer.encode("<|endoftext|>")
        self._encode = tokenizer.encode

    def read(self, image: Image) -> Picture:
        shown = self._encode(f"[image of {image.width} x {image.height} pixels]")
        return Picture(image.digest, array("i", shown), {})


@dataclass
class AgentServer:
    """A running server. `prompts` are those that it has answered, as text."""

    url: str
    engine: AgentEngine
    tokenizer: Tokenizer

    @property
    def prompts(self) -> list[str]:
        return self.engine.prompts


@contextlib.contextmanager
def agent_server(
    folder: Path, rule: str, answer: Answer, *, context: int = 131_072, sees: bool = False
) -> Iterator[AgentServer]:
    """Serve scripted answers.

    rule: a name in GUARDS or EFFORT_RULES, whose rules come before the included model's template
    sees: the model reads images
    """
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model_path() / name, folder / name)
    settings = json.loads((model_path() / "tokenizer_config.json").read_text())
    template = settings["chat_template"]
    if sees:
        template = _PARTS + template.replace("message.content", "said(message.content)").replace(
            "messages[0].content", "said(messages[0].content)"
        )
    settings["chat_template"] = {**GUARDS, **EFFORT_RULES}[rule] + template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(folder)
    engine = AgentEngine(tokenizer, answer, context)
    chat = language_model(
        engine,  # type: ignore[arg-type]
        tokenizer,
        name="local",
        vocab_size=tokenizer.vocab_size,
        default_params=SamplingParams(),
        images=ImagePrompts(SizeReader(tokenizer)) if sees else None,
    )
    with serving(chat) as running:
        yield AgentServer(running.url, engine, tokenizer)
