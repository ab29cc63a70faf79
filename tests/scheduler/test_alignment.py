from __future__ import annotations

from collections.abc import Callable

import pytest


def test_alignment_that_could_starve_a_prompt_is_turned_off_with_a_warning(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(page_size=16, max_num_batched_tokens=20, max_num_seqs=8)
    assert "page_aligned_scheduling is off" in caplog.text
    engine.add([1] * 40, max_tokens=1)
    assert engine.spans(engine.launch()) == [("r0", 0, 20)]
    engine.drain()
