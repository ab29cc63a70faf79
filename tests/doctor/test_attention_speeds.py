"""The figures of attention: each is a rate on both sides, or absent with the reason."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_kernels.speeds import TimedAttention
from mlxserve.doctor import attention_speeds as module
from mlxserve.doctor.attention_speeds import Task, attention_speeds, tasks

DECODE = TimedAttention(context=75, kv_heads=2, head_dim=64, dtype=mx.float32)


def test_ours_and_mlx_attention_are_timed_on_the_same_task() -> None:
    [found] = attention_speeds([Task("a decode", "GB/s", DECODE, DECODE.kv_bytes / 1e9)])
    assert (found.name, found.unit, found.absent) == ("a decode", "GB/s", None)
    assert found.ours is not None
    assert found.mlx_lm is not None
    assert min(found.ours, found.mlx_lm) > 0


def test_one_that_does_not_run_is_absent_and_the_other_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_arguments: object) -> float:
        raise RuntimeError("[metal::Device] Unable to build metal library\nerror: x")

    monkeypatch.setattr(module, "paged_seconds", refused)
    monkeypatch.setattr(module, "dense_seconds", lambda *_arguments: 0.5)
    [found] = attention_speeds([Task("a decode", "GB/s", DECODE, 3.0)])
    assert (found.ours, found.mlx_lm) == (None, 6.0)
    assert found.absent == "mlxserve: [metal::Device] Unable to build metal library"


def test_decodes_are_measured_at_1k_8k_and_32k_and_prompts_of_512_and_2048_rows() -> None:
    alone = [task.what for task in tasks(mx.float16) if task.what.batch == 1]
    assert [what.context for what in alone if what.rows == 1] == [1024, 8192, 32768]
    assert [(what.context, what.rows) for what in alone if what.rows > 1] == [
        (512, 512),
        (2048, 2048),
    ]
    most = max(task.what.kv_bytes for task in tasks(mx.float16))
    assert most < 300e6  # beside the same in one contiguous array, on a machine with 8 GB
