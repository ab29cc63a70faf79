"""Runs a prompt through the paged path, chunk by chunk, and compares it with the dense path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.batch import Batch
from mlxserve.model.load import LoadedModel
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

PAGE = 16
REFERENCE = select_backend("cpu")


@pytest.fixture
def on_a_cpu() -> Iterator[None]:
    """Plain mlx computes on the CPU, also where the default device is a GPU."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="session")
def difference() -> Callable[..., float]:
    """A function (loaded, cuts) -> the largest difference between paged and dense logits.

    A random prompt of cuts[-1] tokens runs in the chunks between the cuts, on scattered pages,
    together with a second prompt; the difference is relative to the largest logit.
    """
    return _difference


def _difference(loaded: LoadedModel, cuts: Sequence[int]) -> float:
    draw = random.Random(3)
    prompts = [[draw.randrange(loaded.vocab_size) for _ in range(cuts[-1])] for _ in range(2)]
    dense = [np.array(loaded.model(mx.array([ids]))[0].astype(mx.float32)) for ids in prompts]
    each = -(-cuts[-1] // PAGE)
    pages = list(range(2 * each))
    draw.shuffle(pages)
    tables = [as_page_table(pages[:each]), as_page_table(pages[each:])]
    kv = KVPool(loaded.layers, 2 * each, PAGE, REFERENCE)
    runner = ModelRunner(loaded, kv)
    requests = [
        LiveRequest(Request(str(i), ids, SamplingParams())) for i, ids in enumerate(prompts)
    ]
    worst = []
    for start, end in pairwise(cuts):
        chunks = [
            Chunk(request, start, end - start, table, samples=True)
            for request, table in zip(requests, tables, strict=True)
        ]
        batch = Batch.from_chunks(chunks, PAGE)
        rows = np.array(
            runner.logits(batch, mx.array(batch.tokens), all_rows=True).astype(mx.float32)
        )
        for found, expected in zip(np.split(rows, 2), dense, strict=True):
            worst.append(np.abs(found - expected[start:end]).max() / np.abs(expected).max())
    return float(np.max(worst))
