"""Caches are limited by number and weight, and evict the least recently used."""

from headwater.model.bounded_cache import BoundedCache


def test_oldest_value_is_evicted_beyond_the_number() -> None:
    cache = BoundedCache[str, int](2, 100)
    for number, key in enumerate("aba"):
        cache.put(key, number)
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [2, None, 3] and (len(cache), cache.weight) == (2, 2)


def test_used_value_is_kept_longer() -> None:
    cache = BoundedCache[str, int](2, 100)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]


def test_values_are_evicted_beyond_the_weight() -> None:
    cache = BoundedCache[str, int](100, 10)
    for key in "abc":
        cache.put(key, 1, 4)
    assert [cache.get(key) for key in "abc"] == [None, 1, 1] and cache.weight == 8
    cache.put("b", 2, 1)
    assert cache.weight == 5


def test_value_heavier_than_the_limit_is_not_cached_and_evicts_nothing() -> None:
    cache = BoundedCache[str, int](100, 10)
    cache.put("a", 1, 5)
    cache.put("b", 2, 5)
    cache.put("a", 3, 11)
    assert [cache.get(key) for key in "ab"] == [None, 2] and cache.weight == 5
    cache.clear()
    assert (len(cache), cache.weight, cache.get("b")) == (0, 0, None)


def test_removed_value_frees_its_weight_and_an_unknown_key_nothing() -> None:
    cache = BoundedCache[str, int](100, 10)
    cache.put("a", 1, 5)
    cache.put("b", 2, 4)
    cache.pop("a")
    cache.pop("unknown")
    assert [cache.get(key) for key in "ab"] == [None, 2] and (len(cache), cache.weight) == (1, 4)
