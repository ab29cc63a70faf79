"""Options that cannot hold together are refused, or turned off with a warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.errors import InvalidConfig
from mlxserve.scheduler.config import SchedulerConfig

PAGE = 32
LARGE = {"page_size": PAGE, "max_num_batched_tokens": 2048, "max_model_len": 4096}


def test_without_chunking_a_budget_below_the_context_is_refused_at_the_start() -> None:
    with pytest.raises(
        InvalidConfig, match=r"max_num_batched_tokens \(2048\).*max_model_len \(4096\)"
    ):
        SchedulerConfig(**LARGE, max_num_seqs=8, enable_chunked_prefill=False)


def test_a_budget_below_the_number_of_decodes_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        SchedulerConfig(page_size=4, max_num_batched_tokens=8, max_num_seqs=9, max_model_len=64)


def test_alignment_that_could_starve_a_prompt_is_turned_off_with_a_warning(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(page_size=16, max_num_batched_tokens=20, max_num_seqs=8)
    assert "page_aligned_scheduling is off" in caplog.text
    engine.add([1] * 40, max_tokens=1)
    assert engine.spans(engine.launch()) == [("r0", 0, 20)]
    engine.drain()
