"""One helper for each lane, made when it is needed."""

from __future__ import annotations

import pytest

from mlxserve.helpers.errors import HelperKilled
from mlxserve.helpers.fair_executor import Lane
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.lane_helpers import LaneHelpers


def test_each_lane_has_one_helper_until_all_are_closed() -> None:
    made: list[Helper] = []

    def make() -> Helper:
        made.append(Helper("tests.helpers.workers:Worker", name="tests", memory=1 << 30))
        return made[-1]

    helpers = LaneHelpers(make)
    assert not made
    short, long = helpers.of(Lane.SHORT), helpers.of(Lane.LONG)
    assert made == [short, long]
    assert helpers.of(Lane.SHORT) is short
    helpers.close()
    for helper in made:
        with pytest.raises(HelperKilled, match="closed"):
            helper.call("whoami", seconds=60.0)
