"""Figures of a model: ours and mlx-lm's have the same names, and what was chosen has its reasons."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxserve.doctor import model_speeds
from mlxserve.doctor.model_speeds import chosen, host, ours, theirs
from mlxserve.request import Request
from mlxserve.system import machine

ModelFolder = Callable[[str], Path]
NAMES = {"prefill 16", "prefill 32", "peak 16", "peak 32", "decode"}


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> str:
    return str(model_folder("qwen3"))


def test_our_engine_and_mlx_lm_give_the_same_figures(model: str) -> None:
    mine = ours(model, (16, 32), context=8, answer=4)
    other = theirs(model, (16, 32), context=8, answer=4)
    assert set(mine) == NAMES
    assert set(other) == NAMES | {"host"}
    assert all(value > 0 for value in (*mine.values(), *other.values()))


def test_a_prompt_longer_than_the_context_is_left_out(model: str) -> None:
    """The model's is 512."""
    found = ours(model, (16, 600), context=8, answer=4)
    assert set(found) == NAMES - {"prefill 32", "peak 32"}
    assert "prefill 600" not in theirs(model, (16, 600), context=8, answer=4)


class SlowEngine:
    """One token of an answer per step, each of which takes 20 ms."""

    max_model_len = 512

    def __init__(self) -> None:
        self._left = 0

    def add(self, request: Request) -> None:
        assert request.params.max_tokens is not None
        self._left = request.params.max_tokens

    @property
    def has_work(self) -> bool:
        return self._left > 0

    def step(self) -> list[SimpleNamespace]:
        time.sleep(0.02)
        self._left -= 1
        return [SimpleNamespace(token_ids=[1])]

    def close(self) -> None:
        pass


def test_the_time_of_a_token_includes_its_step(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(model_speeds, "build_engine", lambda *_arguments: (SlowEngine(), 100))
    found = ours(model, (16, 32), context=8, answer=4)
    assert found["prefill 16"] <= 16 / 0.02
    assert found["prefill 32"] <= 32 / 0.02
    assert found["decode"] <= 1 / 0.02


def test_the_host_builds_a_step_in_some_milliseconds(model: str) -> None:
    assert 0 < host(model)["host"] < 1000


def test_what_was_chosen_has_sizes_limits_and_the_log_that_says_why(model: str) -> None:
    found = chosen(model)
    assert found["pages"] > 2
    assert found["page size"] == 32
    assert found["longest context"] == 512
    assert found["MLX_MAX_MB_PER_BUFFER"]
    text = "\n".join(found["log"])
    assert found["rows of a step"] == (512 if machine.is_metal() else 2048)
    assert found["freed memory that mlx keeps"].endswith(" MB")
    for reason in ("GiB usable, weights", "GiB planned", "attention by cpu"):
        assert reason in text


def our_loggers() -> list[tuple[int, list[logging.Handler]]]:
    """(level, handlers) of the loggers above all of ours."""
    loggers = (logging.getLogger(name) for name in ("mlxserve", "metal_kernels"))
    return [(logger.level, logger.handlers[:]) for logger in loggers]


def test_recording_the_log_changes_no_logger(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    before = our_loggers()
    chosen(model)
    assert our_loggers() == before

    def fail(*_arguments: object) -> None:
        raise RuntimeError("no engine")

    monkeypatch.setattr(model_speeds, "build_engine", fail)
    with pytest.raises(RuntimeError, match="no engine"):
        chosen(model)
    assert our_loggers() == before
