"""The product's API over templates with the rules of public ones, and an engine with a script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from mlxserve.chat.language_model import language_model
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.embedded import model_path
from mlxserve.text.tokenizer import Tokenizer
from tests.api.scripted_engine import ScriptedEngine


class Family:
    """The API over the included model's template, changed as a family's is."""

    def __init__(
        self, folder: Path, change: Callable[[str], str], **template_kwargs: object
    ) -> None:
        """template_kwargs: variables that the server sets"""
        for name in ("tokenizer.json", "config.json"):
            shutil.copy(model_path() / name, folder / name)
        settings = json.loads((model_path() / "tokenizer_config.json").read_text())
        settings["chat_template"] = change(settings["chat_template"])
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.tokenizer = Tokenizer(folder)
        self.engine = ScriptedEngine(self.tokenizer)
        self.chat = language_model(
            self.engine,  # type: ignore[arg-type]
            self.tokenizer,
            name="local",
            vocab_size=self.tokenizer.vocab_size,
            default_params=SamplingParams(),
            template_kwargs=template_kwargs,
        )
        self.client = TestClient(create_app(self.chat), base_url="http://127.0.0.1:8000")

    def post(self, path: str, body: dict[str, Any], says: str = "Done.") -> Any:
        self.engine.says = says
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.engine.requests[-1].token_ids)
