"""Cached instances: limited in number and bytes, with short keys."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.queries.dependencies.bound_tables import analysis

from headwater.model.literal import Embedding, Json, Value
from headwater.queries.dependencies import instances
from headwater.queries.dependencies.bound_dependencies import BoundDependencies
from headwater.queries.dependencies.instances import Instance, Instances, args_size, instance_key
from headwater.queries.etag.query_etag import LONG, pack_args, tag_prefix
from headwater.queries.prepared import PreparedQuery, query_id


def instance(value: Value, sql: str = "SELECT ?") -> Instance:
    prepared = PreparedQuery(query_id("main", sql), "main", sql)
    return Instance(
        prepared, analysis(sql=sql), {"1": value}, BoundDependencies(()), tables={}, generation="g", schema=1
    )


@pytest.mark.parametrize(
    "value", ["x" * 40_000, b"x" * 40_000, Json('"' + "x" * 40_000 + '"'), Embedding((0.5,) * 9_000)]
)
def test_instance_with_large_arguments_is_not_cached(value: Value) -> None:
    known, large = Instances(), instance(value)
    assert known.put(large) == []
    assert len(known) == 0 and known.bytes == 0
    assert known.get(large.key) is None and not known.holds(large)


def test_instances_beyond_the_byte_limit_evict_the_least_recently_used() -> None:
    one = instance("a" * 1_000)
    known = Instances(max_bytes=3 * one.size + instances.TEXT_FACTOR * len("SELECT ?"))
    second, third, fourth = (instance(letter * 1_000) for letter in "bcd")
    assert [known.put(each) for each in (one, second, third)] == [[], [], []]
    assert known.get(one.key) is not None
    assert known.put(fourth) == [second.key]
    assert len(known) == 3 and known.get(second.key) is None


def test_text_of_a_query_is_counted_once_for_all_its_instances() -> None:
    known, long = Instances(most=2), f"SELECT ?, '{'x' * 9_000}'"
    size = instance(1).size
    for number in range(5):
        known.put(instance(number, long))
    assert known.bytes == 2 * size + instances.TEXT_FACTOR * len(long)
    for number in range(5):
        known.put(instance(number))
    assert known.bytes == 2 * size + instances.TEXT_FACTOR * len("SELECT ?")


def test_instance_put_again_is_counted_once() -> None:
    known = Instances()
    known.put(instance("a"))
    before = known.bytes
    known.put(instance("a"))
    assert known.bytes == before and len(known) == 1


def test_key_of_long_arguments_is_short_and_differs_by_value_and_type() -> None:
    long = "x" * 100_000
    values: list[Value] = [long, long + "x", long.encode(), Json(long)]
    keys = [instance_key("q", {"1": value}) for value in values]
    assert all(len(key[2]) < 100 for key in keys)
    assert len(set(keys)) == len(keys)
    assert keys[0] == instance_key("q", {"1": "x" * 100_000})


def test_short_arguments_that_look_like_a_digest_have_another_key() -> None:
    digest = instance_key("q", {"1": "x" * (LONG + 1)})[2]
    assert len(digest) == 65
    assert instance_key("q", {"1": digest}) != instance_key("q", {"1": "x" * (LONG + 1)})
    assert digest[0] == 0xC1, "a byte that msgpack never writes: no encoded arguments begin with it"


@pytest.mark.parametrize("value", [1, "x" * 100_000])
def test_tag_prefix_of_an_instance_is_made_of_its_query_and_arguments(value: Value) -> None:
    found = instance(value)
    packed = pack_args([("1", value)])
    assert found.prefix("rows_json") == tag_prefix(
        db="main", generation="g", epoch="", sql="SELECT ?", names=["1"], packed=packed, format="rows_json"
    )


def test_size_of_large_arguments_is_counted_for_each_kind_of_value() -> None:
    large: list[Value] = ["x" * 10**5, b"x" * 10**5, Json("x" * 10**5), Embedding((1.0,) * 10**5), Decimal("9" * 10**6)]
    assert all(args_size({"1": value}) >= 10**5 for value in large)
    assert args_size({str(number): None for number in range(10**4)}) >= 10**5
    assert args_size({}) == 0
