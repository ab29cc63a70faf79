"""Hostile values of a share of all fields; `python -m tests.reliability every-field` sends all."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.every_field import (
    MAX_LOOP_SECONDS,
    MAX_SECONDS,
    LoopProbe,
    Report,
    run_every_field,
)
from tests.reliability.hostile_fields import (
    CHARACTERS,
    MAX_ITEMS,
    NUMBERS,
    STRING_SIZE,
    Case,
    HostileFields,
)
from tests.waiting import until

SHARE = 31  # a prime: the share has every character, number and route


@pytest.mark.slow
def test_no_value_of_a_share_of_all_fields_holds_the_loop_or_a_processor(tmp_path: Path) -> None:
    report = run_every_field(tmp_path, every=SHARE)
    assert report.num_cases > 200
    assert not report.faults, str(report)


def document(**properties: Any) -> dict[str, Any]:
    """A document of one route with such a body."""
    reference = {"$ref": "#/components/schemas/Body"}
    content = {"application/json": {"schema": reference}}
    inner = {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}, "text": {"type": "string"}},
    }
    return {
        "paths": {"/a": {"post": {"requestBody": {"content": content}}}},
        "components": {
            "schemas": {
                "Body": {"type": "object", "properties": properties, "required": ["known"]},
                "Inner": inner,
            }
        },
    }


def bodies(**properties: Any) -> list[bytes]:
    known = {"known": {"type": "boolean"}}
    described = document(**known, **properties)
    return [case.body for case in HostileFields(described, "m").cases()]


def test_a_text_is_one_character_many_times() -> None:
    sent = [json.loads(body) for body in bodies(text={"type": "string"})]
    assert [each["text"] for each in sent] == [each * STRING_SIZE for each in CHARACTERS]
    assert all(each["known"] is False for each in sent)


def test_a_number_has_the_neighbours_of_its_bounds_and_what_json_has_not() -> None:
    sent = bodies(count={"type": "integer", "minimum": 3, "maximum": 9})
    values = [body.partition(b'"count": ')[2].rstrip(b"}").decode() for body in sent]
    assert values == [*NUMBERS, "2", "3", "4", "8", "9", "10"]


def test_a_list_has_its_most_items_and_one_more() -> None:
    items = {"type": "array", "items": {"type": "boolean"}}
    for bounds, most in (({"maxItems": 5}, 5), ({}, MAX_ITEMS)):
        sent = [json.loads(body)["list"] for body in bodies(list={**items, **bounds})]
        assert [len(each) for each in sent] == [most, most + 1]


def test_fields_within_fields_and_options_are_sent_too() -> None:
    inner = {"$ref": "#/components/schemas/Inner"}
    sent = [json.loads(body) for body in bodies(one={"anyOf": [inner, {"type": "null"}]})]
    assert sum("text" in each["one"] for each in sent) == len(CHARACTERS)
    sent = [json.loads(body) for body in bodies(many={"type": "array", "items": inner})]
    assert sum("text" in each["many"][0] for each in sent) == len(CHARACTERS)


def test_the_longest_hold_of_a_loop_is_measured_and_many_short_ones_are_not() -> None:
    probe = LoopProbe()

    def work(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def main(pieces: int) -> float:
        probe.start()
        probe.take()
        for _ in range(pieces):
            work(0.3 / pieces)
            num_looks = probe.num_looks
            await until(lambda: probe.num_looks > num_looks)  # noqa: B023 (called at once)
        return probe.take()

    assert asyncio.run(main(1)) >= 0.3
    probe = LoopProbe()
    assert asyncio.run(main(30)) < 0.15


def test_what_a_case_did_is_judged() -> None:
    case = Case("POST /a text", "POST", "/a", b"{}")
    for status, loop, seconds, fault in (
        (200, MAX_LOOP_SECONDS, MAX_SECONDS, ""),
        (400, 0.0, 0.0, ""),
        (500, 0.0, 0.0, "500"),
        (200, MAX_LOOP_SECONDS + 0.01, 0.0, "0.26 s without the event loop"),
        (200, 0.0, MAX_SECONDS + 0.01, "2.01 s of a processor"),
    ):
        report = Report()
        report.add(case, status, loop, seconds)
        assert report.faults == ([f"POST /a text: {fault}"] if fault else [])
