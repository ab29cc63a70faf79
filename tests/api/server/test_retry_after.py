"""Retry-After follows how often answers end."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from mlxserve.api.server import retry_after
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.core.errors import QueueFull
from tests.api.fake_chat import FakeChat


@pytest.mark.parametrize(
    ("ends", "now", "seconds"),
    [
        ([], 100.0, 1.0),
        ([0, 10, 20, 30], 40.0, 10.0),
        ([0, 10, 20, 30], 400.0, 60.0),  # none has ended for long
        ([99.0, 99.1, 99.2], 99.3, 1.0),
        ([0.0] * 50 + [100.0 + 2.5 * n for n in range(32)], 180.0, 2.5),  # by the last few
    ],
)
def test_retry_after_is_the_mean_time_between_ends(
    ends: list[float], now: float, seconds: float
) -> None:
    clock = [0.0]
    retry_after = RetryAfter(lambda: clock[0])
    for clock[0] in ends:
        retry_after.ended()
    clock[0] = now
    refusal = retry_after.refusal(QueueFull("it is full"))
    assert float(refusal.headers["retry-after-ms"]) == seconds * 1_000
    assert int(refusal.headers["retry-after"]) == -(-seconds // 1)


def test_finished_answers_are_counted(
    client: TestClient, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_after, "MIN_SECONDS", 0.0)
    for _ in range(3):
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    chat.submit_error = QueueFull("it is full")
    reply = client.post("/v1/completions", json={"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
    assert 0 < float(reply.headers["retry-after-ms"]) < 60_000
