"""What layers with a window need, and how memory is divided between them and the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlxserve.cache.groups import (
    MIN_WINDOWS,
    Window,
    max_useful_pages,
    pages_in,
    split,
    window_of,
)
from mlxserve.cache.pool_memory import max_page_counts

KIB, GB = 1 << 10, 1 << 30


def test_layers_with_a_window_are_a_group_beside_others_only() -> None:
    assert window_of([None, None]) is None
    assert window_of([128, 128]) is None
    assert window_of([]) is None
    assert window_of([128, None, 512]) == 512


def test_a_window_has_the_pages_of_the_positions_that_a_row_sees() -> None:
    for size in [1, 2, 15, 16, 17, 31, 32, 33, 100]:
        window = Window(size, 16)
        counts = []
        for num_pages in range(12):
            before = {p // 16 for p in range(max(0, num_pages * 16 - size + 1), num_pages * 16)}
            assert window.first_before(num_pages) == min(before, default=num_pages), size
            counts.append(len(before))
        assert window.num_seen == max(counts), size


# Bytes of a token in layers that see everything, and in those with a window; the window; the longest
# context; contexts that fit where such layers keep exactly one window (models-review's table, 4 bits).
MODELS = {
    "gpt-oss-20b": (24 * KIB, 24 * KIB, 128, 131_072, (125_627, 131_072)),
    "Gemma 4 26B": (20 * KIB, 200 * KIB, 1024, 262_144, (48_372, 262_144)),
    "Gemma 3 27B": (80 * KIB, 416 * KIB, 1024, 131_072, (54_156, 131_072)),
}


STEP = {"step_tokens": 512}


def cases(page_size: int) -> Iterator[tuple[str, int, int]]:
    """(model, bytes, the longest context that one request alone could have)"""
    for name, (full, windowed, size, longest, contexts) in MODELS.items():
        of_window = Window(size, page_size).num_held * page_size * windowed
        for context in contexts:
            for more in (0, 1 * GB, 8 * GB, 40 * GB):
                nbytes = context * full + size * windowed + more
                yield name, nbytes, min(longest, (nbytes - of_window) // full)


def divided(name: str, nbytes: int, page_size: int, **options: Any) -> tuple[int, float]:
    """(tokens, windows)"""
    full, windowed, size, longest, _ = MODELS[name]
    window = Window(size, page_size)
    settings = {"longest": longest, "num_seqs": 64, **STEP, **options}
    num_pages, num_window_pages = split(
        nbytes, full * page_size, windowed * page_size, window, **settings
    )
    assert (
        window.num_held <= num_window_pages <= max_useful_pages(window, settings["num_seqs"], 512)
    )
    taken = num_pages * full + num_window_pages * windowed
    assert nbytes - full * page_size < taken * page_size <= nbytes
    return num_pages * page_size, window.num_windows(num_window_pages)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_one_seat_has_nearly_the_context_of_one_window(page_size: int) -> None:
    for name, nbytes, _ in cases(page_size):
        full, windowed, size, longest, _ = MODELS[name]
        possible = min(longest, (nbytes - size * windowed) // full)
        assert divided(name, nbytes, page_size, num_seqs=1)[0] >= 0.9 * possible, name


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("num_seqs", [2, 4, 64])
def test_a_context_is_shorter_for_four_windows_and_at_most_by_half(
    page_size: int, num_seqs: int
) -> None:
    num_wanted = min(MIN_WINDOWS, num_seqs)
    found = set()
    for name, nbytes, possible in cases(page_size):
        num_tokens, windows = divided(name, nbytes, page_size, num_seqs=num_seqs)
        assert num_tokens >= possible // 2 - page_size, name
        is_half = num_tokens <= possible // 2 + page_size * 10
        assert windows >= num_wanted or is_half, name
        assert num_tokens >= 0.9 * possible or windows <= num_wanted, name
        found.add((num_tokens >= 0.9 * possible, is_half))
    assert (True, False) in found
    assert (False, False) in found


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_windows_take_nothing_of_a_context_that_is_promised(page_size: int) -> None:
    for name, nbytes, possible in cases(page_size):
        asked = int(0.93 * possible)
        promised = {"longest": asked, "is_promised": True}
        assert divided(name, nbytes, page_size, **promised)[0] >= asked, name
        less = {"longest": asked // 2, "is_promised": True}
        assert divided(name, nbytes, page_size, **less)[1] >= divided(name, nbytes, page_size)[1]


def test_a_mac_of_24_gb_has_room_for_more_than_one_window() -> None:
    """What is left beside the weights and a step of a 4-bit model there, and on one of 32 GB."""
    found = {
        (name, memory): divided(name, int(memory * GB), 32)
        for name, memory in [
            ("Gemma 4 26B", 1.2),
            ("Gemma 4 26B", 4.0),
            ("Gemma 3 27B", 4.0),
            ("Gemma 3 27B", 4.5),
            ("gpt-oss-20b", 1.2),
        ]
    }
    assert {key: (tokens, int(windows)) for key, (tokens, windows) in found.items()} == {
        ("Gemma 4 26B", 1.2): (26_112, 3),
        ("Gemma 4 26B", 4.0): (166_176, 4),
        ("Gemma 3 27B", 4.0): (29_792, 4),
        ("Gemma 3 27B", 4.5): (36_352, 4),
        ("gpt-oss-20b", 1.2): (48_960, 18),
    }


@pytest.mark.parametrize(
    ("name", "memory", "shared", "shared_by_one"),
    [
        ("Gemma 4 26B", 1.2, (52_032, 5.7), (52_032, 2.9)),
        ("Gemma 4 26B", 4.0, (198_816, 19.1), (198_816, 2.9)),
        ("Gemma 3 27B", 4.5, (53_312, 10.2), (53_312, 2.9)),
        ("gpt-oss-20b", 1.2, (52_224, 133.3), (52_224, 7.3)),
    ],
)
def test_shared_memory_holds_either_a_long_context_or_many_windows(
    name: str, memory: float, shared: tuple[int, float], shared_by_one: tuple[int, float]
) -> None:
    """Maximum tokens and windows for 64 requests and for one, as in the table of docs/tuning.md."""
    full, windowed, size, _, _ = MODELS[name]
    window = Window(size, 32)
    for num_seqs, expected in ((64, shared), (1, shared_by_one)):
        num_pages, num_window_pages = max_page_counts(
            int(memory * GB), 32 * full, 32 * windowed, window, num_seqs=num_seqs, **STEP
        )
        assert (num_pages * 32, round(window.num_windows(num_window_pages), 1)) == expected


@pytest.mark.parametrize(("page_bytes", "window_page_bytes"), [(7, 1), (7, 5), (5, 5), (1, 7)])
def test_memory_for_one_window_and_little_else_has_the_pages_of_that_window(
    page_bytes: int, window_page_bytes: int
) -> None:
    """Wherever a page of the other layers fits beside it, however large that is."""
    window = Window(256, 32)
    own = window.num_held * window_page_bytes
    for nbytes in range(own - 3, own + 12 * page_bytes):
        num_pages, num_window_pages = max_page_counts(
            nbytes, page_bytes, window_page_bytes, window, num_seqs=4, **STEP
        )
        assert num_pages == max(0, nbytes - own) // page_bytes
        assert num_window_pages >= window.num_held or not num_pages
        assert num_window_pages * window_page_bytes <= max(0, nbytes)


def test_a_shorter_context_leaves_more_for_windows() -> None:
    lengths = (131_072, 32_768, 8192)
    found = [divided("Gemma 3 27B", 8 * GB, 32, longest=longest) for longest in lengths]
    assert [int(windows) for _, windows in found] == [4, 6, 9]
    assert all(tokens > 8192 for tokens, _ in found)


def test_a_rank_without_layers_of_one_kind_does_not_limit_its_pages() -> None:
    window = Window(1024, 32)
    sizes = {"longest": 8192, "num_seqs": 8, "step_tokens": 512}
    num_pages, num_window_pages = split(GB, 0, 32 * 416 * KIB, window, **sizes)
    assert num_pages > 1_000_000
    assert window.num_held <= num_window_pages <= max_useful_pages(window, 8, 512)
    num_pages, num_window_pages = split(GB, 32 * 80 * KIB, 0, window, **sizes)
    assert num_pages == GB // (32 * 80 * KIB)
    assert num_window_pages == max_useful_pages(window, 8, 512)
    assert pages_in(100, 30) == 3


def test_a_request_holds_the_pages_of_an_image_beside_its_window() -> None:
    plain, seeing = Window(64, 16), Window(64, 16, longest_block=33)
    assert seeing.num_held == plain.num_held + 3
    assert [seeing.first_before(n) for n in range(9)] == [plain.first_before(n) for n in range(9)]
