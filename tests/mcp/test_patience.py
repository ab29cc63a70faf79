"""Progress extends the time of a call, up to an end."""

from __future__ import annotations

import asyncio

from mlxserve.mcp.patience import MAX_EXTENSION, Patience


async def test_the_limit_counts_from_the_last_report_of_progress() -> None:
    now = [100.0]
    patience = Patience(60, lambda: now[0])
    now[0] += 50
    assert patience.left == 10
    await patience.extend(1, None, None)
    assert patience.left == 60
    now[0] += 61
    assert patience.left == -1


async def test_reports_without_end_do_not_extend_it_for_ever() -> None:
    now = [0.0]
    patience = Patience(60, lambda: now[0])
    for _ in range(MAX_EXTENSION - 1):
        now[0] += 59
        await patience.extend(1, 2, "working")
        assert patience.left == 60
    now[0] = MAX_EXTENSION * 60.0
    await patience.extend(1, 2, "working")
    assert patience.left == 0


async def test_a_call_that_ended_is_not_late() -> None:
    now = [0.0]
    patience = Patience(60, lambda: now[0])
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended.set_result(None)
    now[0] = 1e6
    assert await patience.wait(ended)
    assert not await patience.wait(asyncio.get_running_loop().create_future())
