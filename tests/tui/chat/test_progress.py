import pytest

from tui.chat.progress import describe_waiting
from tui.talk.engine_state import Progress


def progress(state: str, position: int | None = None, done: int = 0, of: int = 0) -> Progress:
    return Progress.from_card(
        {
            "id": "x",
            "state": state,
            "position": position,
            "num_computed": done,
            "num_to_compute": of,
        }
    )


def test_every_stage_has_a_text() -> None:
    for seen, words in [
        (None, "Reading the prompt, 3 s"),
        (progress("queued", 2), "Waiting in the queue, position 2, 3 s"),
        (progress("loading"), "Loading cached pages from disk, 3 s"),
        (
            progress("prefilling", None, 12_400, 19_000),
            "Reading the prompt, 12,400 of 19,000 tokens",
        ),
        (progress("decoding"), "Starting the answer, 3 s"),
    ]:
        assert describe_waiting(seen, 3.2).startswith(words), seen


def test_only_a_prefill_has_a_fraction() -> None:
    assert progress("prefilling", None, 5, 20).fraction == 0.25
    assert progress("prefilling", None, 0, 0).fraction is None
    assert progress("queued", 1, 0, 20).fraction is None


def test_an_unknown_stage_is_an_error() -> None:
    with pytest.raises(ValueError, match="dreaming"):
        progress("dreaming")
