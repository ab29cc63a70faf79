"""What a download says of its size, its speed and the time that is left."""

from __future__ import annotations

from mlxserve.hub.model_choices import Downloaded
from tui.chat.download_speed import DownloadSpeed

GB = 10**9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_counts_only_what_this_run_downloaded() -> None:
    clock = Clock()
    speed = DownloadSpeed(clock)
    assert speed.describe(Downloaded(done=GB, total=3 * GB)) == "1.0 of 3.0 GB"
    clock.now += 0.5  # too short to be measured
    assert speed.describe(Downloaded(done=GB + GB // 10, total=3 * GB)) == "1.1 of 3.0 GB"
    clock.now += 9.5
    words = speed.describe(Downloaded(done=GB + GB // 2, total=3 * GB))
    assert words == "1.5 of 3.0 GB, 50 MB/s, 30.0 s left"


def test_an_unknown_total_gives_no_time_left() -> None:
    clock = Clock()
    speed = DownloadSpeed(clock)
    speed.describe(Downloaded(done=0, total=None))
    clock.now += 10
    assert speed.describe(Downloaded(done=GB, total=None)) == "1.0 GB, 100 MB/s"


def test_a_download_that_stands_still_has_no_speed() -> None:
    clock = Clock()
    speed = DownloadSpeed(clock)
    speed.describe(Downloaded(done=GB, total=2 * GB))
    clock.now += 10
    assert speed.describe(Downloaded(done=GB, total=2 * GB)) == "1.0 of 2.0 GB"
