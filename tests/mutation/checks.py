"""What each Metal kernel has to do right, and in which order a mutant is tried.

Most of a mutant's time is the compilation of its text for a check's shapes. So the first check is one of
what the mutated line is about: a window, 8 bits, two simdgroups that share a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import cooperative_tiles
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.replay import DeltaRows, SsmRows
from metal_kernels.rounding import row_error
from metal_kernels.tables import SequenceTables
from tests.metal_kernels.latent_oracle import PagedLatents, latent_case
from tests.metal_kernels.mlx_products import packs_of, random_rows, rows_alone
from tests.metal_kernels.mlx_products import quantised as quantised_weights
from tests.metal_kernels.oracle import TOLERANCES, Case, Paged, quantised
from tests.metal_kernels.test_draft_units import Drafts, check_infinite_values
from tests.metal_kernels.test_replay import cases as replay_cases
from tests.metal_kernels.test_replay import check_rows
from tests.metal_kernels.test_rotary import ROTATIONS, Rotation, check, check_8_bits

# What a line of a text is about, and the labels of checks that are about the same.
TOPICS = {
    r"IS_QUANTISED|scale|D \+ 4|is_kept|stored|kv_head == 0|grid\.y == 0": "q8",
    r"window|first_key|begin|distance": "window",
    r"\bcap\b|\bcapped\b": "softcap",
    r"HAS_ENDS|ahead|my_position": "images",
    r"sinks": "sinks",
    r"SPLIT|split|PARTS|TILES|turn|part\b|threadgroup_barrier": "d256|d512",
    r"TRADITIONAL": "traditional",
    r"JOINED": "gated",
    r"is_value": "of values",
    r"NORMS|epsilon|\? 2 : 1": "norms",
    r"exceeds|x > y": "one head",
    r"GATES": "gates",
    r"PACKED|DK == 128|DV % 8": "packed",
    r"sizeof\(S\)|float\(S\(": "stored",
}


_FUNCTION = re.compile(r"METAL_FUNC [^;{]*?\b(\w+)\(")


@dataclass(frozen=True)
class Check:
    """Something that a kernel has to do right; raises AssertionError or KernelFault."""

    label: str
    run: Callable[[MetalBackend], None]

    def is_about(self, line: str) -> int:
        """Return how many topics it has in common with the mutated line."""
        return sum(
            bool(re.search(topic, line) and re.search(labels, self.label))
            for topic, labels in TOPICS.items()
        )


def most_likely_first(checks: Iterable[Check], line: str) -> list[Check]:
    """All of them; first those that are about the same as the mutated line."""
    return sorted(checks, key=lambda check: -check.is_about(line))


def users_first(
    kernels: Iterable[str], header: str, at: int, texts: Mapping[str, str]
) -> list[str]:
    """Kernels of a header; first those that call the function at a place of it, if through others."""
    starts = [match.start() for match in _FUNCTION.finditer(header)]
    ends = [*starts[1:], len(header)]
    functions = {start: header[start:end] for start, end in zip(starts, ends, strict=True)}
    called = {_name(text) for start, text in functions.items() if start <= at < start + len(text)}
    for _ in functions:  # the longest chain of calls
        called |= {_name(text) for text in functions.values() if _calls(text, called)}
    return sorted(kernels, key=lambda kernel: not _calls(texts[kernel], called))


def _name(function: str) -> str:
    match = _FUNCTION.match(function)
    assert match is not None
    return match[1]


def _calls(text: str, names: set[str]) -> bool:
    return not names.isdisjoint(re.findall(r"\w+", text))


def decodes() -> Iterator[Case]:
    """Several rounds of merging with a head that does not exist; idle lanes; a window, a softcap."""
    large = {"key_dim": 256, "value_dim": 256, "group": 7, "dtype": mx.float16}
    yield Case(((0, 1), (33, 1), (257, 1)), **large)
    small = {"key_dim": 80, "value_dim": 80, "group": 2, "dtype": mx.float16}
    yield Case(((0, 1), (18, 1), (16, 1), (40, 1)), **small)
    yield Case(((20, 1), (18, 1)), window=7, softcap=2.0, **small)
    yield Case(((20, 1), (18, 1)), window=7, is_quantised=True, **small)


def grouped_decodes() -> Iterator[Case]:
    """Heads that do not exist; two simdgroups that share dimensions, for two rounds of keys; windows."""
    small = {"key_dim": 80, "value_dim": 80, "group": 9, "dtype": mx.float16}
    yield Case(((0, 1), (18, 1), (16, 1), (70, 1)), **small)
    yield Case(((70, 1), (18, 1)), window=7, softcap=2.0, **small)
    yield Case(((20, 1), (18, 1)), window=7, is_quantised=True, **{**small, "group": 5})
    large = {"key_dim": 512, "value_dim": 512, "group": 9, "dtype": mx.float16}
    yield Case(((127, 1), (2, 1)), kv_heads=3, **large)


def attends_by_short_page_tables(backend: MetalBackend) -> None:
    """Where two simdgroups share dimensions, those without keys must read no page past the table's end."""
    sizes = {"key_dim": 512, "value_dim": 512, "dtype": mx.float16}
    found = Paged(backend, Case(((16, 1),) * 4, group=8, **sizes))
    found.tables = replace(found.tables, page_tables=found.tables.page_tables[:, :2].copy())
    assert found.error() <= found.tolerance


def attends_where_one_head_finds_a_larger_key(backend: MetalBackend) -> None:
    """The maximum of every other head grows by 300, the others' stay: weights would be infinite."""
    kv_heads, group, dim, context = 8, 8, 64, 256
    tables = SequenceTables(
        np.arange(context // 16, dtype=np.int32)[None],
        np.array([context], np.int32),
        np.array([0, 1], np.int32),
        16,
    )
    is_late = np.arange(context) >= context // 2
    keys = np.zeros((context, kv_heads, dim), np.float32)
    keys[is_late, :, 0] = 1
    values = np.random.default_rng(0).standard_normal(keys.shape, np.float32)
    pools = [backend.new_pool(context // 16, kv_heads, 16, dim, mx.float32) for _ in range(2)]
    slots = np.arange(context, dtype=np.int32)
    backend.write_kv(mx.array(keys), mx.array(values), *pools, slots)
    for first in (0, 1):
        queries = np.zeros((1, kv_heads * group, dim), np.float32)
        queries[:, first::2, 0] = 300
        found = backend.paged_decode(mx.array(queries), *pools, tables, Attention(1.0))
        expected = np.repeat(values.mean(axis=0), group, axis=0)
        expected[first::2] = np.repeat(values[is_late].mean(axis=0), group // 2, axis=0)
        assert row_error(np.array(found), expected[None]) <= TOLERANCES[mx.float32], first


def prefills() -> Iterator[Case]:
    """Chunks that fill no tile; keys that fill no page; a window and a softcap; dimensions in two parts; images."""
    large = {"key_dim": 512, "value_dim": 512, "group": 2, "dtype": mx.float16}
    sizes = {"key_dim": 80, "value_dim": 80, "group": 2, "dtype": mx.float16}
    yield Case(((0, 5), (20, 30), (1, 2)), **sizes)
    yield Case(((40, 20), (3, 1)), window=13, softcap=2.0, has_sinks=True, **sizes)
    yield Case(((40, 20), (3, 1)), is_quantised=True, **sizes)
    yield Case(((3, 6), (20, 2)), **large)
    yield Case(((0, 21), (3, 9)), images=((2, 11), (11, 19), (4, 8)), **sizes)


def cooperative_prefills() -> Iterator[Case]:
    """Chunks that fill no tile; keys that fill no page; a window and a softcap; dimensions in two parts; images."""
    sizes = {"group": 3, "dtype": mx.float16}
    yield Case(((0, 5), (20, 30), (1, 2)), **sizes)
    yield Case(((70, 20), (3, 1)), window=13, softcap=2.0, has_sinks=True, **sizes)
    yield Case(((40, 20), (3, 1)), is_quantised=True, **sizes)
    yield Case(((3, 12), (20, 2)), key_dim=256, value_dim=256, **sizes)
    yield Case(((0, 21), (3, 9)), images=((2, 11), (11, 19), (4, 8)), **sizes)


def latents() -> Iterator[Case]:
    """More lines than a tile has keys, fewer lines than a tile has; dimensions in two parts."""
    yield latent_case(((0, 1), (70, 1)), 20, (256, 64))
    yield latent_case(((0, 2), (20, 17)), 3, (256, 64))
    for rows in (6, 1):
        yield latent_case(((3, rows),), 5, (512, 64), mx.float16)


def attends(case: Case, backend: MetalBackend) -> None:
    found = Paged(backend, case)
    assert found.error() <= found.tolerance


def attends_latents(case: Case, backend: MetalBackend) -> None:
    found = PagedLatents(backend, case)
    assert found.error() <= found.tolerance


def attends_by_cooperative_tensors(case: Case, backend: MetalBackend) -> None:
    rows = {(dim, dtype): 1 for dim in (64, 256) for dtype in cooperative_tiles.DTYPES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cooperative_tiles, "timed_rows", rows)
        attends(case, backend)


def writes(backend: MetalBackend) -> None:
    """Whole pages, single rows and a copy, of several heads each; rows of different lengths."""
    latents = [backend.new_pool(5, 1, 16, dim, mx.float32) for dim in (256, 64)]
    rows = mx.random.normal((2, 1, 256), key=mx.random.key(2))
    backend.write_kv(rows, rows[:, :, :64], *latents, np.array([3, 78], np.int32))
    held = backend.read_kv(*latents, np.arange(80, dtype=np.int32))
    for pool, dim in zip(held, (256, 64), strict=True):
        assert mx.array_equal(pool[mx.array([3, 78])], rows[:, :, :dim])
        assert not pool[4:78].any()
    pools = [backend.new_pool(5, 2, 16, 64, mx.float32) for _ in range(2)]
    slots = np.array([3, *range(32, 64), 70], np.int32)
    rows = mx.random.normal((len(slots), 2, 64), key=mx.random.key(1))
    backend.write_kv(rows, rows + 1, *pools, slots)
    sources, targets = np.array([2, 3], np.int32), np.array([0, 1], np.int32)
    backend.copy_pages(*pools, sources, targets, 16)
    backend.settle()
    for pool, wanted in zip(pools, (rows, rows + 1), strict=True):
        held = np.array(pool).swapaxes(1, 2).reshape(80, 2, 64)
        assert np.array_equal(held[32:64], np.array(wanted)[1:33])
        assert np.array_equal(held[70], np.array(wanted)[33])
        assert np.array_equal(held[:32], held[32:64])


def quantises(backend: MetalBackend) -> None:
    """Rows of zeros, next to zero, with NaN and infinity; dimensions that leave lanes idle."""
    for head_dim in (64, 80):
        rows = np.random.default_rng(head_dim).standard_normal((2, 6, 2, head_dim), np.float32)
        rows[0, 1, 0], rows[0, 2, 1], rows[1, 3, 0, 5], rows[1, 4, 1, 7] = 0, 1e-37, np.nan, np.inf
        pools = [backend.new_pool(2, 2, 16, head_dim, mx.int8) for _ in range(2)]
        slots = np.array([3, 4, 5, 20, 21, 31], np.int32)
        backend.write_kv(mx.array(rows[0]), mx.array(rows[1]), *pools, slots)
        held = backend.read_kv(*pools, np.arange(32, dtype=np.int32))
        for pool, side in zip(held, rows, strict=True):
            values, scales = quantised(side)
            found = np.array(pool)
            assert np.array_equal(found[slots, :, :-4], values)
            assert np.array_equal(found[slots, :, -4:], scales.view(np.int8))
            assert not np.delete(found, slots, axis=0).any()


def drafts() -> Iterator[Drafts]:
    """Idle lanes, a head that does not exist, two rounds of merging; windows, a softcap, 8 bits."""
    sequences = ((63, 4), (126, 5))
    yield Drafts(group=3, head_dim=80, window=21, softcap=2.0, sequences=sequences)
    yield Drafts(group=2, head_dim=256, is_quantised=True, kv_heads=2, sequences=sequences)


def grouped_drafts() -> Iterator[Drafts]:
    """Heads that do not exist, in two parts and a few turns; windows, a softcap, 8 bits."""
    sequences = ((63, 4), (126, 5))
    yield Drafts(group=9, head_dim=80, window=21, softcap=2.0, sequences=sequences)
    yield Drafts(group=4, head_dim=64, is_quantised=True, kv_heads=2, sequences=sequences)


def label_of(each: Drafts) -> str:
    words = ["window softcap" if each.window else "", "q8" if each.is_quantised else ""]
    return " ".join([*words, f"d{each.head_dim}"])


def multiplies(width: int, bits: int, backend: MetalBackend) -> None:
    """As MLX's own kernels multiply each row alone."""
    weights = quantised_weights(8, width, bits, 32, mx.float32)
    rows = random_rows(2, weights)
    found = backend.few_rows.product(rows, weights, packs_of(weights))
    assert mx.array_equal(found, rows_alone(rows, weights))


def replays(kind: type) -> Iterator[Check]:
    """Rows after each state, as mlx-lm's own kernels compute each alone; states in 16 bits as well."""
    for dtype in (mx.float32, mx.bfloat16):
        for label, case in replay_cases(dtype).items():
            if isinstance(case[0], kind):
                yield Check(label, partial(_replays, case))


def rotates(case: Rotation, backend: MetalBackend) -> None:
    check(backend, case)


def _replays(case: Any, backend: MetalBackend) -> None:
    check_rows(backend.replay, case)


def gathered() -> Iterator[Case]:
    """A window that begins inside a page; 8 bits; as many positions as there is room for."""
    long = Case(((40, 256),), dtype=mx.float16)
    yield replace(long, sequences=((100, 256),), window=70)
    yield replace(long, is_quantised=True)
    yield replace(long, sequences=((266, 256),), window=257)


def of_cases(
    cases: Iterable[Case], attend: Callable[[Case, MetalBackend], None] = attends
) -> list[Check]:
    return [Check(str(case), partial(attend, case)) for case in cases]


def checks_of(kernel: str) -> list[Check]:
    """What a kernel has to do right."""
    return _CHECKS.get(kernel, [Check("writes", writes)])


_DECODES = of_cases(decodes())
_CHECKS = {
    "paged_decode": _DECODES,
    "merge_partitions": _DECODES,
    "grouped_decode": [
        *of_cases(grouped_decodes()),
        Check("short page tables d512", attends_by_short_page_tables),
        Check("one head", attends_where_one_head_finds_a_larger_key),
    ],
    "paged_prefill": of_cases(prefills()),
    "cooperative_prefill": of_cases(cooperative_prefills(), attends_by_cooperative_tensors),
    "gather_pages": of_cases(gathered()),
    "rotate_and_write": [
        *(Check(str(case), partial(rotates, case)) for case in ROTATIONS),
        Check("q8", check_8_bits),
    ],
    "quantise_kv": [Check("q8", quantises)],
    "paged_latent": of_cases(latents(), attends_latents),
    "draft_decode": [
        *(Check(label_of(each), each.check) for each in drafts()),
        Check("infinite", check_infinite_values),
    ],
    "grouped_drafts": [
        *(Check(label_of(each), each.check) for each in grouped_drafts()),
        Check("infinite", partial(check_infinite_values, group=8)),
    ],
    "qmv_rows": [
        Check(f"{bits} bits", partial(multiplies, width, bits))
        for width, bits in ((512, 4), (384, 8))  # whole blocks, and lanes without numbers
    ],
    "replay_delta": list(replays(DeltaRows)),
    "replay_ssm": list(replays(SsmRows)),
}
