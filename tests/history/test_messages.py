from mlxserve.history.messages import AnswerStats, Role, StoredMessage, Version, wire_messages


def message(number: int, role: Role, text: str) -> StoredMessage:
    return StoredMessage(id=number, chat_id=1, parent_id=None, role=role, text=text)


def test_speed_counts_the_tokens_after_the_first() -> None:
    assert AnswerStats(completion_tokens=11, decode_seconds=2.0).tokens_per_second == 5.0


def test_speed_is_unknown_without_time_or_tokens() -> None:
    assert AnswerStats(completion_tokens=1, decode_seconds=2.0).tokens_per_second is None
    assert AnswerStats(completion_tokens=9, decode_seconds=0.0).tokens_per_second is None
    assert AnswerStats(completion_tokens=12, decode_seconds=0.0005).tokens_per_second is None
    assert AnswerStats(decode_seconds=2.0).tokens_per_second is None


def test_a_version_has_neighbours_up_to_the_first_and_last() -> None:
    version = Version(1, (7, 9, 12))
    assert (version.neighbour(-1), version.neighbour(1)) == (7, 12)
    assert (version.neighbour(-2), version.neighbour(2)) == (None, None)


def test_messages_are_sent_with_alternating_roles() -> None:
    path = [
        message(1, Role.USER, "q"),
        message(2, Role.ASSISTANT, ""),
        message(3, Role.USER, "r"),
        message(4, Role.ASSISTANT, "a"),
        message(5, Role.USER, "s"),
    ]
    assert wire_messages(path) == [
        {"role": "user", "content": "q\n\nr"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "s"},
    ]


def test_the_pages_of_a_prompt_are_counted_with_its_last_part_of_one() -> None:
    assert AnswerStats(prompt_tokens=5_001, cached_tokens=4_995, page_size=16).pages == (312, 313)
    assert AnswerStats(prompt_tokens=32, cached_tokens=0, page_size=16).pages == (0, 2)
    assert AnswerStats(prompt_tokens=32, cached_tokens=16).pages is None
    assert AnswerStats(prompt_tokens=32, page_size=16).pages is None
