from mlxserve.history.messages import AnswerStats, Role, State, StoredMessage, Version
from tui.chat.stats_text import ending_line, format_seconds, stats_lines


def answer(state: State) -> StoredMessage:
    return StoredMessage(id=1, chat_id=1, parent_id=None, role=Role.ASSISTANT, text="", state=state)


def test_the_lines_contain_all_known_statistics() -> None:
    stats = AnswerStats(
        prompt_tokens=1060,
        cached_tokens=1024,
        completion_tokens=101,
        first_token_seconds=0.214,
        decode_seconds=2.5,
    )
    assert stats_lines(stats) == (
        "40.0 tok/s · first token 0.21 s · cached 1,024 of 1,060 prompt tokens",
        "40.0 tok/s · first token 0.21 s · cached 1,024 of 1,060",
        "40.0 tok/s · cached 1,024 of 1,060",
        "40.0 tok/s",
    )
    assert stats_lines(stats, is_live=True)[-1] == "about 40.0 tok/s"


def test_a_prompt_is_counted_in_pages_of_the_cache_where_they_are_known() -> None:
    stats = AnswerStats(
        prompt_tokens=5_001,
        cached_tokens=4_992,
        page_size=16,
        completion_tokens=101,
        decode_seconds=2.5,
    )
    assert stats_lines(stats) == (
        "40.0 tok/s · 312 pages of 313 from the cache",
        "40.0 tok/s · cached 312 of 313 pages",
        "40.0 tok/s · cached 312 of 313 pages",
        "40.0 tok/s",
    )


def test_drafts_are_shown_as_tokens_of_a_step() -> None:
    stats = AnswerStats(completion_tokens=101, accepted_tokens=59, decode_seconds=2.5)
    assert stats_lines(stats)[0] == "40.0 tok/s · 2.4 tokens a step"
    for nothing in (0, None):  # none was right, and nothing was drafted
        stats = AnswerStats(completion_tokens=101, accepted_tokens=nothing, decode_seconds=2.5)
        assert stats_lines(stats)[0] == "40.0 tok/s"


def test_unknown_statistics_are_left_out() -> None:
    assert set(stats_lines(AnswerStats())) == {""}
    assert stats_lines(AnswerStats(prompt_tokens=12))[0] == "12 prompt tokens"
    uncached = AnswerStats(prompt_tokens=12, cached_tokens=0)
    assert stats_lines(uncached)[0] == "cached 0 of 12 prompt tokens"


def test_shorter_times_have_more_digits() -> None:
    for seconds, words in [
        (0.0, "0.00 s"),
        (0.999, "1.00 s"),
        (4.25, "4.2 s"),
        (59.94, "59.9 s"),
        (125.0, "2 min 05 s"),
    ]:
        assert format_seconds(seconds) == words, seconds


def test_only_an_unusual_ending_is_shown() -> None:
    alone = Version(0, (1,))
    assert ending_line(answer(State.DONE), alone) == ""
    assert ending_line(answer(State.STOPPED), alone) == "stopped"
    assert "limit" in ending_line(answer(State.CUT), alone)
    assert "repeated itself" in ending_line(answer(State.REPEATED), alone)


def test_versions_are_counted_from_one() -> None:
    assert ending_line(answer(State.STOPPED), Version(1, (1, 2))) == "stopped · ‹ version 2 of 2 ›"
