"""Record the steps of a real engine: the input of the simulator's cost model.

A recording has one JSON line per step: what the step contained, and its seconds as the engine
measures them for its own pacing.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.hub.files import find_model
from mlxserve.request import Chunk, Request
from tests.perf.simulation.costs import Fit, StepWork, fit, read_trace

PAGE_SIZE = 32
_WARM_UP = 3  # steps
_SHORT = 64  # tokens of the prompts that only decode
_LONGEST_ANSWER = 24  # tokens
_VOCABULARY = 1000


class RecordingTimeModel(StepTimeModel):
    """A pace that also writes every step it observes to a file."""

    def __init__(self, target: float | None, file: TextIO, *, skip: int = 0) -> None:
        """`skip`: warm-up steps at the beginning that are not written."""
        super().__init__(target)
        self._file = file
        self._skip = skip

    def observe(self, chunks: Sequence[Chunk], seconds: float, waited: float = 0.0) -> None:
        super().observe(chunks, seconds, waited)
        if self._skip:
            self._skip -= 1
            return
        line = {"seconds": seconds, **asdict(StepWork.of(chunks))}
        self._file.write(json.dumps(line) + "\n")


def recorded_fit(model: str, out: Path | None = None) -> Fit:
    """Record a load of the default sizes, and fit it; keep the recording if `out` is given."""
    with tempfile.TemporaryDirectory() as folder:
        file = out or Path(folder) / "steps.jsonl"
        return record(model, file, max_context=4096, max_num_seqs=16, max_num_batched_tokens=2048)


def record(
    model: str, out: Path, *, max_context: int, max_num_seqs: int, max_num_batched_tokens: int
) -> Fit:
    """Run the load, write one line per step to `out`, and fit it.

    Contexts up to `max_context` tokens or what the model allows, up to `max_num_seqs` decodes in a
    step, and prompts of all lengths, alone and with decodes, so that the cost model's five terms
    vary independently.
    """
    num_pages = 2 * max_context // PAGE_SIZE + 4 * max_num_seqs
    config = EngineConfig().with_options(
        model=model,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    draw = random.Random(0)
    with out.open("w", encoding="utf-8") as file:
        pace = RecordingTimeModel(config.itl_target, file, skip=_WARM_UP)
        files = find_model(config.model, config.revision)
        engine, vocab_size = build_engine(config, files, pace=pace)
        longest = min(max_context, engine.max_model_len - _LONGEST_ANSWER)
        for number, (lengths, tokens) in enumerate(_waves(longest, max_num_seqs)):
            for index, length in enumerate(lengths):
                name = f"record-{number}-{index}"
                engine.add(_request(name, draw, length, tokens, min(_VOCABULARY, vocab_size)))
            _drain(engine)
        engine.close()
    return fit(read_trace(out))


def _waves(max_context: int, max_num_seqs: int) -> list[tuple[list[int], int]]:
    """(prompt lengths, tokens of each answer) of requests that arrive together."""
    waves: list[tuple[list[int], int]] = [([_SHORT], 8)]
    context = 128
    while context <= max_context:
        waves.append(([context], 8))  # alone: a prompt's time by its length
        waves.append(([_SHORT] * 3 + [context], _LONGEST_ANSWER))  # with decodes
        context *= 2
    count = 2
    while count <= max_num_seqs:
        waves.append(([_SHORT] * count, 12))  # decodes by their number
        waves.append(([max_context // count] * count, 12))  # and by their contexts
        count *= 2
    return waves


def _request(
    name: str, draw: random.Random, length: int, max_tokens: int, vocab_size: int
) -> Request:
    token_ids = [draw.randrange(vocab_size) for _ in range(length)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(name, token_ids, params)


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
