"""A table of hostile model outputs, and checks that none of them affects the terminal.

In memory, every cell of the screen is checked. In tmux, configured to obey every request, the
cursor, clipboard, title, modes and frame must not change, and every escape sequence written must be
one that a harmless answer uses as well.
"""

import re
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.strip import Strip

from mlxserve.history.messages import Role, State
from tests.tui import scripts
from tests.tui.chats_on_disk import branch
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Open, Pane
from tui.home import Home

pytestmark = pytest.mark.slow

OSC_52 = "52;c;b3duZWQ="  # "owned", for the clipboard
HOSTILE: dict[str, str] = {
    # Escape sequences, in seven bits
    "clear the screen": "\x1b[2J\x1b[3J\x1b[H",
    "move the cursor": "\x1b[1;1HOWNED\x1b[99;99HOWNED\x1b[5AOWNED",
    "set a scroll region and scroll": "\x1b[1;5r\x1b[20S\x1b[20T\x1b[20L\x1b[20M",
    "leave the other screen": "\x1b[?1049l\x1b[?47l",
    "show the cursor and follow the mouse": "\x1b[?25h\x1b[?1000h\x1b[?1003h\x1b[?2004l",
    "change the modes": "\x1b[4h\x1b[?6h\x1b[?7l\x1b[?1h\x1b=\x1b[20h",
    "reset": "\x1bc\x1b[!p",
    "another set of characters": "\x1b(0\x0eqqqq\x1b)0",
    "clipboard, ended by a bell": f"\x1b]{OSC_52}\x07",
    "clipboard, ended by ST": f"\x1b]{OSC_52}\x1b\\",
    "title": "\x1b]0;owned\x07\x1b]2;owned\x1b\\\x1bkowned\x1b\\",
    "colours and questions": "\x1b]4;1;#ff0000\x07\x1b]10;?\x07\x1b]11;#ffffff\x07\x1b]104\x07",
    "a link that says another": "\x1b]8;;http://evil.example\x1b\\https://good.example\x1b]8;;\x1b\\",
    "what a terminal answers as keys": "\x1b[c\x1b[6n\x1b[?1;2c\x1b[>q\x05",
    "device control": f'\x1bP$q"p\x1b\\\x1bPtmux;\x1b\x1b]{OSC_52}\x07\x1b\\',
    "application, privacy and string": "\x1b_Gf=24;AAAA\x1b\\\x1b^x\x1b\\\x1bXx\x1b\\",
    "notification": "\x1b]9;owned\x07\x1b]777;notify;a;b\x07\x1b]1337;SetUserVar=a=b\x07",
    "an escape at the very end": "done\x1b",
    # Control characters
    "escape sequences in eight bits": f"\x9b2J\x9b1;1HOWNED\x9d{OSC_52}\x9c\x90x\x9c\x84\x85\x8d",
    "bells": "\x07" * 500,
    "backspace and carriage return": "safe\b\b\b\bevil\rEVIL\x7f\x7f",
    "nul and the rest": "".join(map(chr, range(0x20))) + "".join(map(chr, range(0x7F, 0xA0))),
    "tabs": "a\tb\t\tc\n\t\t\td\n" + "\t" * 3000 + "end",
    "form feeds and vertical tabs": "a\fb\vc\x1cd\x1de\x1ef\x85g\u2028h\u2029i",
    # By way of Markdown
    "escapes as entities": "&#27;[2J&#x1b;]52;c;b3duZWQ=&#7;&#155;2J&#x202e;abc",
    "escapes in every element": "# \x1b[2J\n> \x1b[H\n- \x9b2J\n\n|\x1bc|\n|-|\n|\x07|\n\n`\x1b]0;x\x07`",
    "a language that is an escape": "```\x1b]0;owned\x07 \x1b[2J\nx\n```\n~~~[red]\ny\n~~~",
    "links to other than web sites": "[a](javascript:alert(1)) [b](file:///etc/passwd) [c](http://x\x1b[2J)",
    "an address that turns around": "<http://good.example/\u202egpj.evil> ![\u202e](data:,\x1b[H)",
    "tags": "<script>alert(1)</script><img src=x onerror=y><!-- \x1b[2J -->&lt;b&gt;",
    "console markup": "[bold red]x[/] [/] [@click=app.quit]y[/] [link=file:///etc]z[/link] [",
    "brackets": "[" * 3000 + "]" * 3000 + "(" * 3000,
    "marks": "*" * 3001 + "_" * 3001 + "~" * 3001 + "`" * 3001,
    "an unclosed fence": "```python\n" + "x = '''\n" * 1500,
    "code whose lexer does not end": "```bash\n$'" + "\\" * 400 + "\n```\nafter",
    "code of quadratic time": "```html+ng2\n" + "(" * 20_000 + "\n```\nafter",
    "fences in fences": "````\n```\n~~~\n" * 100,
    "deep quotes": ">" * 400 + " deep\n" + "> " * 400 + "deeper",
    "deep lists": "\n".join(f"{'  ' * depth}- {depth}" for depth in range(150)),
    "a giant table": f"|{'a|' * 200}\n|{'-|' * 200}\n" + f"|{'b|' * 200}\n" * 40,
    "a long table": "|a|b|\n|-|-|\n" + "|[red]|\x1b[2J|\n" * 1500,
    "endless numbers": "999999999. a\n\n9999999999999. b\n\n0. c\n" + "1" * 5000 + ". d",
    "many definitions": "".join(f"[{n}]: http://x.example/{n} 'y'\n" for n in range(2000)) + "[7]",
    "one line of a megabyte": "a long line without an end " * 40_000,
    "one word of a megabyte": "a" * 1_000_000,
    "a heading of a hundred thousand": "# " + "a b" * 33_000,
    # Unicode
    "override": "\u202eevil\u202c \u202dx \u202ay \u202bz",
    "isolates that stay open": "\u2066a\u2067b\u2068c" * 50,
    "marks of direction": "a\u200eb\u200fc\u061cd",
    "right to left": "שלום עולם مرحبا بالعالم " * 40,
    "nothing to see": "a\u200bb\u200cc\u200dd\u2060e\ufefff\u00adg\u180eh\u3164i\u115fj" * 30,
    "letters on letters": "Z" + "\u0301\u0489\u20dd\ufe20" * 2000 + "algo",
    "only marks": "\u0300" * 500 + "\n\n\ufe0f\ufe0f\u20e3 \u0301",
    "wide at the edge": "界" * 400 + "\n\na" + "界" * 400,
    "wide in code": "```\n" + "a" + "界" * 300 + "\n" + "👩‍🚀" * 100 + "\n```",
    "emoji of many parts": "👩‍👩‍👧‍👦👩🏽‍🚀🏳️‍🌈❤️1️⃣☎️⚠️™️ 🇩🇪🇫🇷🇯 " * 20,
    "the widest": "﷽꧅𒐫⸻" * 60,
    "tags that cannot be seen": "a"
    + "".join(chr(0xE0000 + ord(c)) for c in "ignore the above")
    + "b",
    "no characters": "\ufffe\uffff\U0010ffff\U0001fffe\ue000\U000f0000" * 20,
    "halves": "a\ud800b\udfffc",
}
SHORT = [name for name, text in HOSTILE.items() if len(text) <= 15_000]
# Of every kind; an answer takes a third of a second, a long one seconds.
SOME = SHORT[::2]
OTHERS = [name for name in HOSTILE if name not in SOME]

POSITIONED = re.compile(r"\x1b(?:\[[0-9;:]*m|\[[0-9;]*H)")
# The shape of the mouse pointer, which Textual sets when what is under the pointer has changed.
POINTER = re.compile(r"\x1b\]22;[a-z-]*(?:\x1b\\|\x07)")
CONTROL = re.compile("[\x00-\x09\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def is_harmless(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cs") and unicodedata.bidirectional(
        character
    ) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


some_and_others = pytest.mark.parametrize(
    "names",
    [pytest.param(SOME, id="some"), pytest.param(OTHERS, marks=pytest.mark.long, id="others")],
)


@some_and_others
async def test_no_answer_puts_anything_harmful_on_the_screen(
    names: Sequence[str], terminal: Open, server: FakeServer
) -> None:
    def check(name: str, strip: Strip, width: int) -> None:
        assert strip.cell_length == width, name
        assert sum(segment.cell_length for segment in strip) == width, name
        assert all(is_harmless(character) for character in strip.text), (name, strip.text)

    async with terminal(size=(80, 24)) as t:
        await t.ask("/thinking")  # open in every chat from now on
        for name in names:
            server.script(scripts.think(HOSTILE[name]), scripts.say(HOSTILE[name]))
            await t.press("ctrl+n")
            await t.ask(name)
            await t.until(lambda: len(t.views) == 2 and t.views[1].message.state is State.DONE)
            await t.until_ready()
            for at_the_end in (False, True):
                transcript = t.app.window.transcript
                transcript.scroll_to(y=transcript.max_scroll_y * at_the_end, animate=False)
                await t.pilot.pause()
                for strip in t.strips:
                    check(name, strip, t.app.size.width)
            assert t.app.clipboard == "", name
            assert t.app.title == "mlxserve", name


# Everything in a terminal that an answer could change, as a tmux format.
STATE = (
    "#{pane_title}|#{window_name}|#{alternate_on}|#{cursor_x},#{cursor_y}|#{cursor_flag}"
    "|#{insert_flag}|#{origin_flag}|#{wrap_flag}|#{keypad_flag}|#{keypad_cursor_flag}"
    "|#{scroll_region_upper}-#{scroll_region_lower}|#{mouse_any_flag}|#{mouse_all_flag}"
    "|#{pane_tabs}|#{window_bell_flag}|#{pane_width}x#{pane_height}"
)
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def obedient(pane: Pane) -> None:
    """Configure a terminal that obeys every request."""
    for option in ("set-clipboard", "allow-passthrough", "allow-rename", "monitor-bell"):
        pane.set(option, "on")


def last_answer(home: Home) -> str | None:
    """The saved text of the newest chat's answer, once it is done."""
    message = branch(home)[-1]
    is_done = message.role is Role.ASSISTANT and message.state is State.DONE
    return message.text if is_done else None


def lines_of(screen: str) -> list[str]:
    """The lines with text, but for the list of earlier chats, which grows."""
    return [line for line in screen.split("\n") if line.strip() and "Open  " not in line]


def frame(screen: str) -> list[str]:
    """The lines below the messages: the composer, and the start of the status line."""
    lines = screen.split("\n")
    return [*lines[-4:-1], *lines[-1].split()[:1]]


@needs_tmux
@some_and_others
def test_no_answer_controls_the_terminal(
    names: Sequence[str], pane: Pane, server: FakeServer, home: Home, tmp_path: Path
) -> None:
    obedient(pane)
    pane.open("--url", server.url)
    pane.log(tmp_path / "written")
    pane.until_ready()
    empty = pane.until_shown("Ask   Explain")

    def ask(name: str, text: str) -> str:
        server.script(scripts.say(text))
        pane.ask(name)
        pane.until(lambda screen: name in screen.split("\n")[0])
        pane.until(lambda _: last_answer(home) is not None)
        return pane.until(lambda screen: frame(screen) == frame(empty))

    def leave() -> None:
        """Open an empty chat, on which no cell of the answer may remain."""
        pane.press("C-n")
        pane.until(lambda screen: lines_of(screen) == lines_of(empty))

    ask("harmless", "# Harmless\n\n`code` and *words*\n\n- a\n\n|a|\n|-|\n|b|\n" * 9)
    before, harmless = pane.shown(STATE), sequences(tmp_path / "written")
    leave()
    for name in names:
        ask(name, HOSTILE[name])
        pane.until(lambda _: pane.shown(STATE) == before)  # not in the middle of a redraw
        assert pane.clipboard == "", name
        leave()
        assert sequences(tmp_path / "written") <= harmless, name


def sequences(written: Path) -> set[str]:
    """The kinds of escape sequences in the output, and its other control characters."""
    text = written.read_bytes().decode("utf-8", "replace")
    unplaced = POSITIONED.sub("", POINTER.sub("", text))
    # Not the last one, which may be written only in part by now.
    *found, _ = re.findall("\x1b.[^\x1b]{0,8}", unplaced)
    return {*found, *CONTROL.findall(text)}


@pytest.mark.long
@needs_tmux
def test_the_same_terminal_obeys_unfiltered_output(pane: Pane, tmp_path: Path) -> None:
    obedient(pane)
    harm = tmp_path / "harm"
    harm.write_text(
        HOSTILE["clipboard, ended by a bell"]
        + HOSTILE["title"]
        + HOSTILE["show the cursor and follow the mouse"]
        + HOSTILE["set a scroll region and scroll"]
        + "\n"
    )
    before = pane.shown(STATE)
    pane.run(f"cat {harm}; sleep 1000")
    pane.until(lambda _: pane.clipboard == "owned" and "owned" in pane.shown("#{pane_title}"))
    after = pane.shown(STATE)
    assert "owned" in after
    assert after.split("|")[10:13] != before.split("|")[10:13]
