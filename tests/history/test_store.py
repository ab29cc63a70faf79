import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mlxserve.history.chat_file import StoreError
from mlxserve.history.messages import AnswerStats, ChatRecord, Role, State, StoredMessage
from mlxserve.history.store import REQUESTED, SeenLeaf, StaleWrite, Store


def talk(store: Store, *texts: str) -> tuple[ChatRecord, list[StoredMessage]]:
    """A chat of alternating questions and answers."""
    chat = store.create_chat(texts[0])
    messages: list[StoredMessage] = []
    for number, text in enumerate(texts):
        parent = messages[-1].id if messages else None
        role = Role.ASSISTANT if number % 2 else Role.USER
        messages.append(store.add(chat.id, parent, role, text))
    return chat, messages


def test_a_chat_survives_reopening_the_file(store: Store, path: Path) -> None:
    chat, messages = talk(store, "hello", "hi")
    store.close()
    again = Store.open(path)
    assert again.chats() == [again.chat(chat.id)]
    assert again.path(again.chat(chat.id).leaf_id) == messages
    again.close()


def test_a_title_is_the_start_of_the_first_question(store: Store) -> None:
    assert store.create_chat("Why\n is \x1b[31mthe sky " + "blue " * 40).title.startswith(
        "Why is ␛[31mthe sky blue"
    )
    assert store.create_chat("  \n ").title == "New chat"


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("# The **plan**\n\n- first `step`\n- second", "The plan first step second"),
        ("```python\nprint(1)\n```\nWhat is wrong?", "print(1) What is wrong?"),
        ("> quoted\nmy_name stays", "quoted my_name stays"),
        ("word " * 20, "word " * 11 + "word…"),
        ("x" * 80, "x" * 59 + "…"),
        ("```\n```", "New chat"),
    ],
)
def test_a_title_has_no_signs_of_markdown_and_ends_with_a_word(
    store: Store, question: str, title: str
) -> None:
    assert store.create_chat(question).title == title
    chat = store.create_chat("one")
    store.rename(chat.id, "# mine")
    assert store.chat(chat.id).title == "# mine"


def test_chats_are_listed_by_their_last_change(store: Store) -> None:
    first, messages = talk(store, "one")
    second, _ = talk(store, "two")
    assert [chat.id for chat in store.chats()] == [second.id, first.id]
    store.add(first.id, messages[-1].id, Role.USER, "again")
    assert [chat.id for chat in store.chats()] == [first.id, second.id]


def test_every_field_of_an_answer_is_saved(store: Store) -> None:
    chat, [question] = talk(store, "q")
    answer = store.add(chat.id, question.id, Role.ASSISTANT, "", state=State.WRITING, model="m")
    stats = AnswerStats(
        prompt_tokens=9,
        cached_tokens=8,
        differs_at=9,
        miss="new_text",
        completion_tokens=7,
        first_token_seconds=0.5,
        decode_seconds=2.5,
    )
    answer = replace(
        answer, text="t\U0001f600", thinking="th", state=State.FAILED, error="e", stats=stats
    )
    store.save(answer)
    assert store.message(answer.id) == answer


def test_answers_to_one_question_are_versions(store: Store) -> None:
    chat, [question, first, *_] = talk(store, "q", "a", "q2", "a2")
    second = store.add(chat.id, question.id, Role.ASSISTANT, "b")
    assert store.version(second).sibling_ids == (first.id, second.id)
    assert store.version(second).index == 1
    assert store.version(first).neighbour(1) == second.id
    assert store.version(first).neighbour(-1) is None
    assert [m.text for m in store.path(second.id)] == ["q", "b"]


def test_a_first_question_has_versions_too(store: Store) -> None:
    chat, [first, *_] = talk(store, "q", "a")
    second = store.add(chat.id, None, Role.USER, "q'")
    assert store.version(first).sibling_ids == (first.id, second.id)
    other, _ = talk(store, "elsewhere")
    assert store.version(second).sibling_ids == (first.id, second.id)
    assert other.id != chat.id


def test_a_branch_is_shown_down_to_its_newest_descendant(store: Store) -> None:
    chat, messages = talk(store, "q", "a", "q2", "a2")
    store.add(chat.id, messages[0].id, Role.ASSISTANT, "b")
    assert store.show_branch(chat.id, messages[1].id) == messages[3].id
    assert store.chat(chat.id).leaf_id == messages[3].id
    newer = store.add(chat.id, messages[2].id, Role.ASSISTANT, "a2'")
    assert store.show_branch(chat.id, messages[1].id) == newer.id


def test_deleting_a_chat_deletes_its_messages(store: Store) -> None:
    chat, messages = talk(store, "needle", "a")
    kept, _ = talk(store, "other needle")
    store.delete(chat.id)
    assert [hit.chat.id for hit in store.search("needle")] == [kept.id]
    with pytest.raises(StoreError, match="was deleted"):
        store.message(messages[0].id)
    with pytest.raises(StoreError, match="was deleted"):
        store.chat(chat.id)


def test_a_chat_of_more_messages_than_sqlite_follows_is_deleted() -> None:
    store = Store.in_memory()
    other, kept = talk(store, "another chat")
    chat, _ = talk(store, *map(str, range(1_100)))
    store.delete(chat.id)
    assert not store.messages(chat.id)
    assert [each.id for each in store.chats()] == [other.id]
    assert store.messages(other.id) == kept
    store.close()


def test_writing_to_a_chat_deleted_elsewhere_is_an_error(store: Store, path: Path) -> None:
    chat, messages = talk(store, "q")
    other = Store.open(path)
    other.delete(chat.id)
    other.close()
    with pytest.raises(StoreError, match="was deleted"):
        store.add(chat.id, messages[0].id, Role.ASSISTANT, "a")
    with pytest.raises(StoreError, match="was deleted"):
        store.save(messages[0])
    assert store.chats() == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("lighthouse", ["The LightHouse keeper"]),
        ("keeper house", ["The LightHouse keeper"]),
        ("hth", ["The LightHouse keeper"]),
        ("ke", ["The LightHouse keeper"]),
        ("天空", ["天空为什么是蓝色的"]),
        ("什么是蓝色", ["天空为什么是蓝色的"]),
        ("100%", ["100% sure_"]),
        ("%", ["100% sure_"]),
        ("_", ["100% sure_"]),
        ('"say" -or* (', []),
        ("AND", []),
        ("  ", []),
    ],
)
def test_search_finds_parts_of_words_in_any_script(
    store: Store, words: str, found: list[str]
) -> None:
    for text in ("The LightHouse keeper", "天空为什么是蓝色的", "100% sure_", "nothing"):
        talk(store, text)
    assert [store.message(hit.message_id).text for hit in store.search(words)] == found


def test_a_search_result_has_an_excerpt_around_the_match(store: Store) -> None:
    talk(store, "begin " * 50 + "needle " + "end " * 50)
    (hit,) = store.search("Needle")
    assert hit.excerpt.startswith("…")
    assert "needle" in hit.excerpt
    assert len(hit.excerpt) < 130


def test_an_answer_is_found_by_its_final_text(store: Store) -> None:
    chat, [question] = talk(store, "q")
    answer = store.add(chat.id, question.id, Role.ASSISTANT, "", state=State.WRITING)
    store.save(replace(answer, text="first draft"))
    assert store.search("draft") == []
    store.save(replace(answer, text="final text", state=State.DONE))
    assert store.search("draft") == []
    assert [hit.message_id for hit in store.search("final")] == [answer.id]


def test_the_index_matches_the_messages(store: Store, path: Path) -> None:
    chat, messages = talk(store, "q", "a")
    store.save(replace(messages[1], text="b"))
    store.delete(chat.id)
    talk(store, "c")
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO messages_text(messages_text, rank) VALUES ('integrity-check', 1)")
    db.close()


def test_recovery_stops_the_answers_of_dead_terminals_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, [question] = talk(store, "q")
    dead = store.add(chat.id, question.id, Role.ASSISTANT, "", state=State.WRITING)
    store.save(replace(dead, text="half"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)
    alive = store.add(chat.id, question.id, Role.ASSISTANT, "", state=State.WRITING)
    assert store.recover() == 1
    assert (store.message(dead.id).state, store.message(dead.id).text) == (State.STOPPED, "half")
    assert store.message(alive.id).state is State.WRITING


def test_two_terminals_write_at_the_same_time(store: Store, path: Path) -> None:
    def write(name: str) -> None:
        other = Store.open(path)
        chat = other.create_chat(name)
        for number in range(40):
            other.add(chat.id, None, Role.USER, f"{name} {number}")
        other.close()

    threads = [threading.Thread(target=write, args=(name,)) for name in ("ann", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.search("ann", 100)) == len(store.search("bob", 100)) == 40


def test_questions_are_listed_once_oldest_first(store: Store) -> None:
    talk(store, "one", "x", "two", "y", "one")
    assert store.questions() == ["two", "one"]


def test_a_system_prompt_is_saved_and_changed(store: Store) -> None:
    chat = store.create_chat("one", "Rhyme.")
    assert store.chat(chat.id).system == chat.system == "Rhyme."
    store.set_system(chat.id, "")
    assert store.chat(chat.id).system == ""


def test_settings_are_saved(store: Store) -> None:
    assert store.setting("theme") is None
    store.set_setting("theme", "a")
    store.set_setting("theme", "b")
    assert store.setting("theme") == "b"


def test_the_last_chat_s_model_is_known_by_what_it_was_asked_for(store: Store) -> None:
    assert store.last_model() is None
    chat = store.create_chat("one")
    question = store.add(chat.id, None, Role.USER, "one")
    assert store.last_model() is None
    for model in ("first", "org/second"):
        store.add(chat.id, question.id, Role.ASSISTANT, "x", model=model)
        assert store.last_model() == model
    store.set_setting(f"{REQUESTED}org/second", "/models/second")
    assert store.last_model() == "/models/second"


def test_a_store_in_memory_works() -> None:
    store = Store.in_memory()
    _, messages = talk(store, "hello", "hi")
    assert store.path(messages[-1].id) == messages
    store.close()


def test_an_answer_of_a_process_that_has_ended_is_stopped_at_once(store: Store, path: Path) -> None:
    chat = store.create_chat("One")
    question = store.add(chat.id, None, Role.USER, "One")
    answers = [
        store.add(chat.id, question.id, Role.ASSISTANT, "Begun", state=State.WRITING)
        for _ in range(2)
    ]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE messages SET writer = ? WHERE id = ?", (ended.pid, answers[0].id))
    assert store.recover() == 1
    assert [store.message(each.id).state for each in answers] == [State.STOPPED, State.WRITING]


def test_an_answer_is_stopped_when_a_later_process_has_its_writers_id(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where each start of a server has the same id."""
    chat = store.create_chat("One")
    question = store.add(chat.id, None, Role.USER, "One")
    with monkeypatch.context() as patch:
        started = psutil.Process().create_time()
        patch.setattr(time, "time", lambda: started - 3)
        before = store.add(chat.id, question.id, Role.ASSISTANT, "Begun", state=State.WRITING)
    monkeypatch.setattr(time, "time", lambda: started + 3)
    after = store.add(chat.id, question.id, Role.ASSISTANT, "Begun", state=State.WRITING)
    assert store.recover() == 1
    assert store.message(before.id).state is State.STOPPED
    assert store.message(after.id).state is State.WRITING


def test_a_stale_write_changes_nothing(store: Store) -> None:
    chat = store.create_chat("One")
    first = store.add(chat.id, None, Role.USER, "One", seen=SeenLeaf(None))
    for seen in (SeenLeaf(None), SeenLeaf(first.id + 1)):
        with pytest.raises(StaleWrite) as stale:
            store.add(chat.id, first.id, Role.USER, "Two", seen=seen)
        assert stale.value.leaf_id == first.id
        with pytest.raises(StaleWrite):
            store.show_leaf(chat.id, None, seen)
    assert [each.id for each in store.messages(chat.id)] == [first.id]
    assert store.chat(chat.id).leaf_id == first.id
    store.add(chat.id, first.id, Role.USER, "Two", seen=SeenLeaf(first.id))
