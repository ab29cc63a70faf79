"""What one client keeps is found by no other, and pushed out by no other that keeps more."""

from __future__ import annotations

from random import Random

from mlxserve.system.owned_cache import OwnedCache


def test_a_value_is_found_by_its_owner_alone() -> None:
    cache = OwnedCache[str, str](4)
    cache.put("good", "a.png", "pixels")
    assert cache.get("good", "a.png") == "pixels"
    assert cache.get("evil", "a.png") is None
    assert cache.get("", "a.png") is None
    cache.put("evil", "a.png", "others")
    assert (cache.get("good", "a.png"), len(cache)) == ("pixels", 2)


def test_much_of_one_owner_pushes_out_its_own_alone() -> None:
    cache = OwnedCache[int, bytes](100, len)
    cache.put("good", 0, bytes(40))
    for number in range(50):
        cache.put("evil", number, bytes(20))
        assert cache.get("good", 0) is not None
    assert [n for n in range(50) if cache.get("evil", n) is not None] == [47, 48, 49]
    cache.put("third", 0, bytes(15))
    assert (cache.get("good", 0), cache.size) == (bytes(40), 95), "evil had most"


def test_the_least_recently_used_value_goes_first() -> None:
    cache = OwnedCache[int, int](3)
    for number in range(3):
        cache.put("a", number, number)
    cache.get("a", 0)
    cache.put("a", 3, 3)
    assert [cache.get("a", number) for number in range(4)] == [0, None, 2, 3]


def test_sizes_hold_under_any_order_of_calls() -> None:
    random = Random(56)
    cache = OwnedCache[int, bytes](64, len)
    for _ in range(2_000):
        owner, key = random.choice("abc"), random.randrange(6)
        action = random.randrange(4)
        if action == 0:
            cache.drop(owner, key)
        elif action == 1:
            cache.evict()
        else:
            cache.put(owner, key, bytes(random.randrange(80)))
        kept = [value for o in "abc" for k in range(6) if (value := cache.get(o, k)) is not None]
        assert (len(cache), cache.size) == (len(kept), sum(map(len, kept)))
        assert cache.size <= 64
    cache.clear()
    assert (len(cache), cache.size) == (0, 0)
    cache.evict()
