"""What layers with a window need, and how memory is divided between them and the others."""

from __future__ import annotations

import pytest

from mlxserve.cache.groups import Window, num_in, split, wanted, window_of

KIB, GB = 1 << 10, 1 << 30


def test_layers_with_a_window_are_a_group_beside_others_only() -> None:
    assert window_of([None, None]) is None
    assert window_of([128, 128]) is None
    assert window_of([]) is None
    assert window_of([128, None, 512]) == 512


def test_a_window_has_the_pages_of_the_positions_that_a_row_sees() -> None:
    for size in [1, 2, 15, 16, 17, 31, 32, 33, 100]:
        window = Window(size, 16)
        for position in range(200):
            seen = range(max(0, position - size + 1), position + 1)
            assert window.first_seen(position) == seen[0] // 16, size
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_contexts_are_nearly_those_of_one_window(name: str, page_size: int) -> None:
    full, windowed, size, longest, contexts = MODELS[name]
    window = Window(size, page_size)
    for context in contexts:
        for more in (0, 1 * GB, 8 * GB, 40 * GB):
            nbytes = context * full + size * windowed + more
            num_pages, num_window_pages = split(
                nbytes,
                full * page_size,
                windowed * page_size,
                window,
                longest=longest,
                num_seqs=64,
                step_tokens=512,
            )
            possible = min(longest, (nbytes - size * windowed) // full)
            assert num_pages * page_size >= 0.9 * possible
            assert window.num_held <= num_window_pages <= wanted(window, 64, 512)
            taken = num_pages * full + num_window_pages * windowed
            assert nbytes - full * page_size < taken * page_size <= nbytes


def test_a_shorter_context_leaves_more_for_windows() -> None:
    window = Window(1024, 32)
    found = [
        split(
            8 * GB,
            32 * 80 * KIB,
            32 * 416 * KIB,
            window,
            longest=longest,
            num_seqs=64,
            step_tokens=512,
        )
        for longest in (131_072, 32_768, 8192)
    ]
    assert [windows // window.num_held for _, windows in found] == [2, 6, 9]
    assert [pages * 32 for pages, _ in found] > [60_000, 32_768, 8192]


def test_a_rank_without_layers_of_one_kind_does_not_limit_its_pages() -> None:
    window = Window(1024, 32)
    sizes = {"longest": 8192, "num_seqs": 8, "step_tokens": 512}
    num_pages, num_window_pages = split(GB, 0, 32 * 416 * KIB, window, **sizes)
    assert num_pages > 1_000_000
    assert window.num_held <= num_window_pages <= wanted(window, 8, 512)
    num_pages, num_window_pages = split(GB, 32 * 80 * KIB, 0, window, **sizes)
    assert num_pages == GB // (32 * 80 * KIB)
    assert num_window_pages == wanted(window, 8, 512)
    assert num_in(100, 30) == 3
