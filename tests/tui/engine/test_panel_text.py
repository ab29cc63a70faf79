from dataclasses import replace

import pytest

from mlxserve.history.messages import AnswerStats
from tui.engine.page_map import PageMapReplica
from tui.engine.panel_text import (
    NUM_OWNERS,
    PAGE_STATES,
    OwnerColours,
    answer_lines,
    format_size,
    legend,
    now_lines,
    request_lines,
    sparkline,
    window_legend,
)
from tui.talk.engine_state import EngineStats, Progress, RequestStage


def test_the_bar_shows_how_much_was_reused_and_where_the_prompt_differs() -> None:
    stats = AnswerStats(
        prompt_tokens=19_020,
        cached_tokens=18_432,
        differs_at=18_440,
        miss="new_text",
        completion_tokens=43,
        first_token_seconds=0.49,
        decode_seconds=1.0,
    )
    lines = answer_lines(stats, 40).plain.split("\n")
    assert lines == [
        "reused 18,432 of 19,020 tokens",
        "█" * 39 + "░",
        "differs at token 18,440: new text",
        "first token 0.49 s · prefill 1,200 tok/s",
        "decode 42.0 tok/s",
    ]


def test_every_reason_has_a_text() -> None:
    for miss, words in [
        ("new_text", "new text from the first token on"),
        ("evicted", "evicted"),
        ("other_salt", "another cache salt"),
        ("below_one_page", "too short"),
        ("off", "the prefix cache is off"),
        ("something_new", "not reused: something_new"),
    ]:
        stats = AnswerStats(prompt_tokens=90, cached_tokens=0, differs_at=0, miss=miss)
        assert words in answer_lines(stats, 40).plain, miss


def test_an_unfilled_last_page_is_named_as_the_reason() -> None:
    stats = AnswerStats(prompt_tokens=90, cached_tokens=64, differs_at=64, miss="below_one_page")
    assert "the rest is under a page" in answer_lines(stats, 60).plain


def test_missing_statistics_are_reported_as_missing() -> None:
    assert "does not report" in answer_lines(AnswerStats(prompt_tokens=90), 40).plain
    assert "No answer yet" in answer_lines(None, 40).plain
    assert answer_lines(AnswerStats(), 40).plain == ""


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0, 0], "  "), ([0, 50, 100], " ▅█"), ([7], "█")]
)
def test_a_sparkline_is_relative_to_its_largest_value(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_requests_in_a_row_have_different_colours_and_keep_them() -> None:
    colour_of = OwnerColours()
    names = [f"request-{number}" for number in range(1000)]
    first = [colour_of(name) for name in names[:NUM_OWNERS]]
    assert sorted(first) == list(range(NUM_OWNERS))
    assert colour_of(names[1]) == first[1]
    for name in names:
        colour_of(name)
    assert colour_of(names[-1]) == colour_of(names[-1])


def test_requests_are_listed_with_their_progress() -> None:
    reading = Progress("8f3a12bc99", RequestStage.PREFILLING, None, 620, 1000)
    writing = Progress("mine", RequestStage.DECODING, None, 0, 0, 212, 14)
    queued = Progress("77aa", RequestStage.QUEUED, 3, 0, 0)
    lines = request_lines([reading, writing, queued], "mine", 42, 3, OwnerColours()).plain.split(
        "\n"
    )
    assert lines[0].startswith("■ 8f3a12bc9 reading ━━")
    assert lines[0].endswith(" 62%")
    assert lines[1] == "■ this chat writing 212 tokens, 14 pages"
    assert lines[2] == "■ 77aa      waiting 3"
    assert request_lines([reading, writing, queued], None, 42, 2, OwnerColours()).plain.endswith(
        "and 2 more"
    )
    assert request_lines([], None, 42, 3, OwnerColours()).plain == ""


def test_the_engine_s_statistics_are_shown() -> None:
    stats = EngineStats(
        num_running=2,
        num_waiting=5,
        num_preemptions=1,
        prefill_rate=1234.5,
        decode_rate=42.1,
        hit_rate=0.84,
        kv_cache_size=1 << 30,
        kv_cache_dtype="q8",
        active_size=3 << 30,
        peak_size=5 << 30,
        disk_size=0,
        disk_limit=0,
        disk_state="off",
        num_state_slots=0,
        num_snapshots=0,
    )
    words = now_lines(stats).plain
    for part in (
        "running 2 · waiting 5",
        "decode 42.1",
        "preemptions 1",
        "hits 84%",
        "5.0 GiB",
        "1.0 GiB q8",
    ):
        assert part in words
    faster = replace(stats, decode_rate=84.2, prefill_rate=0.0)
    charts = now_lines(stats, (faster, stats), 42).plain.split("\n")
    assert charts[1].endswith("tok/s" + " " * 15 + "█ ≤1,234"), "0 is no bar"
    assert charts[2].endswith("█▄ ≤84")
    assert len(charts[1]) == len(charts[2]) == 42
    assert "disk" not in words
    assert "states" not in words
    on_disk = replace(stats, disk_limit=1 << 30, disk_state="works")
    assert "on disk 0 MiB of 1.0 GiB" in now_lines(on_disk).plain
    failed = replace(on_disk, disk_state="failed")
    assert "on disk 0 MiB of 1.0 GiB (has failed)" in now_lines(failed).plain
    stateful = replace(stats, num_state_slots=1024, num_snapshots=17)
    assert "KV cache 1.0 GiB q8 · states kept 17 of 1,024" in now_lines(stateful).plain


def test_the_legend_distinguishes_the_states_without_colour() -> None:
    page_map = PageMapReplica()
    page_map.apply(
        "snapshot",
        {"page_size": 32, "num_pages": 9, "pages": "p1a2s1c3f2", "requests": [], "gone": []},
    )
    words = legend(page_map, 4, page_map.fold(3, ())).plain
    assert len({sign for sign, *_ in PAGE_STATES.values()}) == 6
    for part in ("▲ pinned 1", "■ active 2", "◆ shared 1", "□ cached 3", "· free 2"):
        assert part in words
    assert "this chat 4" in words
    assert "9 pages of 32 tokens; each cell is 3 pages" in words


def test_the_pages_of_windows_are_counted() -> None:
    page_map = PageMapReplica()
    told = {"page_size": 32, "num_pages": 1, "pages": "f1", "requests": [], "gone": []}
    page_map.apply("snapshot", {**told, "window_pages": "a2c3f5"})
    assert window_legend(page_map).plain == "10 pages · cached 3 · active 2"


def test_sizes_have_binary_units() -> None:
    assert (format_size(812 << 20), format_size(7 << 29)) == ("812 MiB", "3.5 GiB")
