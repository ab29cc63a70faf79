from __future__ import annotations

from collections.abc import Sequence

from mlxserve.history.context import ContextUse, last_to_go, num_left_out, used_tokens
from mlxserve.history.messages import AnswerStats, LeftOut, Role, StoredMessage


def chat(*counts: int | None) -> list[StoredMessage]:
    """Exchanges whose answers end at these numbers of tokens, 10 of them the answer's."""
    path = []
    for number, count in enumerate(counts):
        stats = (
            AnswerStats()
            if count is None
            else AnswerStats(prompt_tokens=count - 10, completion_tokens=10)
        )
        for role, of in ((Role.USER, AnswerStats()), (Role.ASSISTANT, stats)):
            message = StoredMessage(
                id=len(path) + 1, chat_id=1, parent_id=len(path) or None, role=role,
                text=f"{role} {number}", stats=of,
            )  # fmt: skip
            path.append(message)
    return path


def question(path: Sequence[StoredMessage]) -> StoredMessage:
    return StoredMessage(
        id=len(path) + 1, chat_id=1, parent_id=path[-1].id, role=Role.USER, text="and?"
    )


def test_the_use_of_the_context_in_words() -> None:
    for used, limit, words, is_nearly_full in [
        (0, 4096, "0 / 4.1k", False),
        (1234, 32_768, "1.2k / 33k", False),
        (3300, 4096, "3.3k / 4.1k", True),
        (950, None, "950 tokens", False),
        (0, None, "", False),
    ]:
        use = ContextUse(used, limit)
        assert (use.label, use.is_nearly_full) == (words, is_nearly_full), used


def test_the_tokens_are_those_of_the_last_answer_that_the_server_counted() -> None:
    assert used_tokens([], None) == 0
    assert used_tokens(chat(100, 250), None) == 250
    assert used_tokens(chat(100, None), None) == 100


def test_half_of_the_context_is_freed_by_whole_exchanges() -> None:
    path = chat(100, 400, 700, 1000)
    path.append(question(path))
    last = last_to_go(path, None, 500)
    assert last is not None
    assert last.text == "assistant 2"  # 1000 - 700 stay; after the one before, 600 would
    assert last_to_go(path, None, 0) == path[7]


def test_what_was_left_out_counts_no_more() -> None:
    path = chat(100, 400, 700, 1000)
    left_out = LeftOut(path[5].id, path[7].id)
    assert num_left_out(path, left_out) == 6
    assert used_tokens(path, left_out) == 300
    # The next answer's prompt no longer had it.
    path += [
        question(path),
        StoredMessage(
            id=10, chat_id=1, parent_id=9, role=Role.ASSISTANT, text="ok",
            stats=AnswerStats(prompt_tokens=340, completion_tokens=20),
        ),
    ]  # fmt: skip
    assert used_tokens(path, left_out) == 360
    assert last_to_go(path, left_out, 100) == path[7]


def test_without_counts_everything_before_the_last_question_goes() -> None:
    path = chat(None, None)
    path.append(question(path))
    assert last_to_go(path, None, 500) == path[3]


def test_a_question_alone_has_nothing_to_leave_out() -> None:
    path = chat(100)
    assert last_to_go(path[:1], None, 500) is None
    path.append(question(path))
    assert last_to_go(path, LeftOut(path[1].id, path[1].id), 500) is None


def test_another_branch_is_whole() -> None:
    path = chat(100, 200)
    assert num_left_out(path, LeftOut(77, 80)) == 0
