"""all-MiniLM-L6-v2 by a server: the figures that its makers publish, and the order that a reader expects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.api.clients import openai
from tests.api.server.process import Process
from tests.real.prompts import EMBEDDER

pytestmark = pytest.mark.slow

# The example of sentence-transformers' first page (sbert.net, "Usage"), with its figures.
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def vectors(client: Any, texts: list[str]) -> np.ndarray:
    reply = client.embeddings.create(model=EMBEDDER, input=texts)
    return np.array([one.embedding for one in reply.data])


def test_similarities_are_the_published_ones(client: Any) -> None:
    found = vectors(client, SENTENCES)
    assert found.shape == (3, 384)
    np.testing.assert_allclose(
        found @ found.T, SIMILARITIES, atol=5e-5
    )  # as far as they are printed


def test_a_text_is_the_same_beside_others_of_any_length(client: Any) -> None:
    long = " ".join(SENTENCES * 12)
    together = vectors(client, [long, *SENTENCES, "Hi", *SENTENCES[::-1]])
    alone = [vectors(client, [text])[0] for text in (long, *SENTENCES, "Hi")]
    np.testing.assert_allclose(together[:5], alone, atol=1e-5)
    np.testing.assert_allclose(together[5:], alone[3:0:-1], atol=1e-5)


def test_documents_are_ranked_by_what_they_are_about(client: Any) -> None:
    documents = [
        "The Eiffel Tower was finished in 1889.",
        "A cat sleeps for up to sixteen hours a day.",
        "Bread rises because yeast makes carbon dioxide.",
    ]
    for query, best in (
        ("How long do cats sleep?", 1),
        ("Why does dough grow?", 2),
        ("When was the tower in Paris built?", 0),
    ):
        body = {"model": EMBEDDER, "query": query, "documents": documents}
        reply = client.post("/rerank", body=body, cast_to=object)
        assert reply["results"][0]["index"] == best


def test_embed_prints_the_vectors(server: Process, client: Any) -> None:
    command = [sys.executable, "-m", "mlxserve", "embed", "--url", server.url, "-m", EMBEDDER]
    command += SENTENCES
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in printed.splitlines()]
    np.testing.assert_allclose(found, vectors(client, SENTENCES), atol=1e-6)
