from __future__ import annotations

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from mlxserve.cache.hashing import extend_hashes, page_hash

PAGE_SIZE = 4
GOLDEN = ["7de8c1ec2abc2c96ed9f9a8342fe6d8c", "5307f24835f6adc86fbdbd8723498718"]
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=30)


def hashes_of(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, PAGE_SIZE, salt)
    return hashes


def test_a_hash_is_blake2b_128_of_the_parent_and_raw_little_endian_tokens() -> None:
    parent = bytes(range(16))
    raw = parent + struct.pack("<4i", 1, 2, 3, 2**31 - 1)
    assert page_hash(parent, [1, 2, 3, 2**31 - 1]) == blake2b(raw, digest_size=16).digest()


def test_the_hashes_of_a_prompt_are_the_same_in_every_run() -> None:
    assert [h.hex() for h in hashes_of(list(range(8)), b"salt")] == GOLDEN


def test_the_same_page_after_another_prefix_has_another_hash() -> None:
    assert hashes_of([1] * 8)[1] != hashes_of([2] * 4 + [1] * 4)[1]


def test_a_repeated_page_has_another_hash() -> None:
    first, second = hashes_of([1] * 8)
    assert first != second


@given(tokens.filter(lambda t: len(t) >= PAGE_SIZE), st.binary(max_size=20), st.binary(max_size=20))
def test_prompts_of_different_salts_share_no_hash(
    token_ids: list[int], salt: bytes, other: bytes
) -> None:
    shared = set(hashes_of(token_ids, salt)) & set(hashes_of(token_ids, other))
    assert bool(shared) == (salt == other)


def test_a_salt_that_equals_a_hash_does_not_give_the_hash_of_its_successor() -> None:
    first, second = hashes_of([1] * 4 + [2] * 4)
    assert hashes_of([2] * 4, salt=first) != [second]


@given(tokens, st.integers(0, 30))
def test_hashes_extended_in_two_steps_equal_those_of_one(token_ids: list[int], cut: int) -> None:
    hashes = hashes_of(token_ids[:cut], b"s")
    extend_hashes(hashes, token_ids, PAGE_SIZE, b"s")
    assert hashes == hashes_of(token_ids, b"s")


@given(tokens)
def test_only_full_pages_have_a_hash(token_ids: list[int]) -> None:
    assert len(hashes_of(token_ids)) == len(token_ids) // PAGE_SIZE


@given(tokens, tokens, tokens)
def test_two_prompts_share_exactly_the_hashes_of_their_common_full_pages(
    prefix: list[int], one: list[int], other: list[int]
) -> None:
    one, other = prefix + one, prefix + other
    agree = 0
    while one[: agree + 1] == other[: agree + 1] and agree < min(len(one), len(other)):
        agree += 1
    pairs = zip(hashes_of(one), hashes_of(other), strict=False)
    assert sum(a == b for a, b in pairs) == agree // PAGE_SIZE
