"""The cache of answers: limited, found by exact tag, and never by a tag of two contents."""

from typing import Any

from headwater.queries.patch.patch import Answer
from headwater.queries.patch.recent_results import Results


def answer(tag: str, *values: Any) -> Answer:
    return Answer.of(tag, ({"name": "v"},), [(value,) for value in values], key=(0,))


def test_recent_result_is_found_only_by_its_query_its_strong_or_weak_etag_and_its_hash() -> None:
    results, kept = Results(), answer('"p.1"', 1)
    results.keep("q", kept)
    assert results.find("q", '"p.1"') is kept and results.find("q", 'W/"p.1"') is kept
    assert results.find("q", '"p.2"') is None and results.find("r", '"p.1"') is None
    assert results.find("q", '"p.1"', kept.hash) is kept
    assert results.find("q", '"p.1"', answer('"p.1"', 2).hash) is None


def test_tag_of_two_different_results_finds_neither() -> None:
    results, first = Results(), answer('W/"p.1"', 1)
    results.keep("q", first)
    results.keep("q", answer('W/"p.1"', 1))
    assert results.find("q", '"p.1"') is first
    results.keep("q", answer('W/"p.1"', 2))
    assert results.find("q", '"p.1"') is None
    results.keep("q", first)
    assert results.find("q", '"p.1"') is None and results.latest("q") is None and results.bytes == 0


def test_only_the_last_answers_of_an_instance_are_cached() -> None:
    results = Results(per_instance=2)
    for number in range(4):
        results.keep("q", answer(f'"p.{number}"', number))
    results.keep("r", answer('"p.0"', 0))
    assert [results.find("q", f'"p.{number}"') is not None for number in range(4)] == [False, False, True, True]
    assert results.find("r", '"p.0"') is not None
    newest = results.latest("q")
    assert newest is not None and newest.tag == '"p.3"'


def test_result_used_least_recently_is_evicted_beyond_the_byte_limit() -> None:
    one = answer('"p.0"', "x" * 1000)
    results = Results(max_bytes=3 * one.size)
    for name in "abc":
        results.keep(name, one)
    assert results.find("a", one.tag) is one
    results.keep("d", one)
    assert [results.find(name, one.tag) is one for name in "abcd"] == [True, False, True, True]
    assert results.bytes == 3 * one.size and len(results) == 3


def test_result_over_the_size_limit_is_not_cached_and_evicts_nothing() -> None:
    small = answer('"p.1"', 1)
    results = Results(max_bytes=small.size)
    results.keep("q", small)
    results.keep("r", answer('"p.1"', "x" * 1000))
    assert results.find("q", '"p.1"') is small and len(results) == 1
