"""The memory of recurrent states is as large after many conversations as after a few."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.model.attention import choose_attention
from mlxserve.model.load import prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import STATE_SLOTS, FinishReason, Request
from mlxserve.scheduler.scheduler import Scheduler

NUM_STEPS = 2_000  # with 20,000, memory was as flat
NUM_PEOPLE, NUM_SNAPSHOTS, NUM_PAGES, PAGE_SIZE = 4, 12, 80, 16


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "rwkv7"])
def test_many_conversations_take_no_more_memory_than_a_few(
    kind: str, build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]
) -> None:
    """Answers go on, are aborted and preempted; snapshots are kept, found and evicted."""
    choice = choose_attention("auto", prepare(*build_model(kind), kind))
    loaded = choice.loaded
    num_slots = STATE_SLOTS * NUM_PEOPLE + NUM_SNAPSHOTS
    config = SchedulerConfig(max_model_len=400, max_num_seqs=NUM_PEOPLE)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = Scheduler(config, pool, ends=[StateSlots(num_slots, pool)])
    kv = KVPool(loaded.layers, NUM_PAGES, PAGE_SIZE, choice.backends)
    engine = Engine(scheduler, ModelRunner(loaded, kv), StepTimeModel(None))
    draw = random.Random(3)
    shared = [draw.randrange(400) for _ in range(40)]
    histories = [list(shared) for _ in range(NUM_PEOPLE)]
    asked: dict[int, Any] = {}
    peaks = []
    peak = number = 0
    for step in range(NUM_STEPS):
        for person, history in enumerate(histories):
            request = asked.get(person)
            if request is not None and request.is_finished:
                history[:] = [*request.token_ids]
                del asked[person]
            if person not in asked:
                if len(history) > 330:
                    history[:] = shared
                history += [draw.randrange(400) for _ in range(draw.randrange(5, 30))]
                params = SamplingParams(max_tokens=draw.randrange(5, 40), ignore_eos=True)
                number += 1
                [asked[person]] = engine.add_all([Request(str(number), history, params)])
            elif draw.random() < 0.01:
                engine.abort(request.id, FinishReason.ABORT)
        engine.step()
        peak = max(peak, mx.get_active_memory())
        if step % (NUM_STEPS // 10) == 0:
            peaks.append(peak)
            peak = 0
            stats = engine.monitor.stats()
            assert stats.states.num_snapshots <= num_slots
            engine.check()
    assert stats.states.num_restored > NUM_STEPS // 100
    assert stats.states.num_evicted > NUM_STEPS // 100
    assert median(peaks[6:]) < 1.02 * median(peaks[2:6])
