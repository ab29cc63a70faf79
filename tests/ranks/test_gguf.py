"""A GGUF file is read whole by each rank, and divided as other files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hub.gguf.test_models import llama_file
from tests.ranks.workload import answers, answers_of_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_ranks_answer_from_a_gguf_file_what_one_process_does(split: str, tmp_path: Path) -> None:
    file, _ = llama_file(tmp_path, {})
    ranks: dict[str, Any] = {f"{split}_parallel_size": 2}
    found = answers_of_ranks(file, vocabulary=250, **ranks)
    wanted = answers(file, vocabulary=250)
    for name in ("alone", "together", "from the cache", "preempted"):
        assert found[name] == wanted[name], name
