"""Apps and servers over a scripted chat, a real engine, and an engine that generates a given text.

mlx is imported only by the fixtures that need it: it takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.testclient import TestClient

from mlxserve.api.app import create_app
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.embedded import model_path
from mlxserve.text.tokenizer import Tokenizer
from tests.api.fake_chat import FakeChat
from tests.api.scripted_engine import ScriptedEngine
from tests.api.serving import Serve, StartServer, serving

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

REAL_CONTEXT = 2_500


@pytest.fixture
def chat() -> FakeChat:
    return FakeChat()


@pytest.fixture
def client(chat: FakeChat) -> Iterator[TestClient]:
    app = create_app(chat, aliases=["default"])  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def strict_client(chat: FakeChat) -> Iterator[TestClient]:
    """Of a server that answers to its model's names only."""
    app = create_app(chat, aliases=["default"], strict_model_names=True)  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def start_server(chat: FakeChat) -> Iterator[StartServer]:
    """A function that starts a server over the scripted chat."""
    with contextlib.ExitStack() as servers:
        yield lambda **options: servers.enter_context(serving(chat, **options))
        chat.release()


@pytest.fixture(scope="session")
def real_chat(
    write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TextModel]:
    """A real engine in this process, for the session."""
    from mlxserve.build import build_text_model

    folder = write_model(
        tmp_path_factory.mktemp("real"), "qwen3", max_position_embeddings=REAL_CONTEXT
    )
    chat = build_text_model(
        EngineConfig().with_options(
            model=str(folder), num_pages=512, max_num_seqs=16, disable_log_stats=True
        )
    )
    yield chat
    chat.close()


@pytest.fixture(scope="session")
def serve_real(real_chat: TextModel) -> Serve:
    """A function that serves it, with access and limits as given; the engine outlives the server."""
    return lambda **options: serving(real_chat, stop_engine=lambda: None, **options)


@pytest.fixture(scope="module")
def real_url(serve_real: Serve) -> Iterator[str]:
    """Of a server of it for everyone."""
    with serve_real() as server:
        yield server.url


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The embedded model's."""
    return Tokenizer(model_path())


@pytest.fixture(scope="session")
def scripted_chat(tokenizer: Tokenizer) -> Iterator[tuple[TextModel, ScriptedEngine]]:
    """(a real TextModel, the engine whose text it parses)."""
    from mlxserve.chat.language_model import language_model

    engine = ScriptedEngine(tokenizer)
    chat = language_model(
        engine,  # type: ignore[arg-type]
        tokenizer,
        name="scripted",
        vocab_size=tokenizer.vocab_size,
        default_params=SamplingParams(),
    )
    yield chat, engine
    chat.close()


@pytest.fixture(scope="session")
def serve_scripted(scripted_chat: tuple[TextModel, ScriptedEngine]) -> Serve:
    """A function that serves it; the chat outlives the server."""
    return lambda **options: serving(scripted_chat[0], stop_engine=lambda: None, **options)
