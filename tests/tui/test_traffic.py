"""What an answer costs a slow line, such as ssh over a phone: bytes, not time."""

from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import OpenWindow
from tests.tui.test_end_to_end import ENTER, attached

WORDS = (
    "The sky is blue because air scatters short waves more than long ones, so that from all sides "
)
TEXT = (
    WORDS + "blue light reaches the eye, and in the evening only the long red waves are left over."
)[:200]
PIECES = [TEXT[at : at + 10] for at in range(0, len(TEXT), 10)]
MOST = 200_000  # bytes; over five seconds they are 16,000, and were 53,000


def test_an_answer_of_200_characters_writes_few_bytes(
    open_window: OpenWindow, server: FakeServer
) -> None:
    gates = [scripts.Gate() for _ in PIECES]
    steps = [
        step
        for piece, gate in zip(PIECES, gates, strict=True)
        for step in (*scripts.say(piece), gate)
    ]
    server.script(steps)
    window = open_window(*attached(server.url))
    window.wait_for("Ready")
    before = len(window.all_written.encode())
    window.press("Why is the sky blue?" + ENTER)
    for piece, gate in zip(PIECES, gates, strict=True):
        window.wait_for(piece.split()[-1])  # on the screen before the next one comes
        gate.open()
    window.wait_for("Ready")
    assert len(window.all_written.encode()) - before < MOST
