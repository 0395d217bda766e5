"""Tags of answers: different query instances have different prefixes, and foreign tags are rejected."""

from __future__ import annotations

from decimal import Decimal

import pytest

from headwater.model.literal import U64, Date, Value
from headwater.queries.dependencies.instances import instance_key
from headwater.queries.etag.query_etag import QueryTag, pack_args, read_tag, tag_prefix


def prefix(args: tuple[tuple[str, Value], ...] = (("1", 1),), /, **other: str) -> str:
    texts = {"db": "main", "generation": "g", "epoch": "e", "sql": "SELECT ?", "format": "rows_json"} | other
    return tag_prefix(names=[name for name, _ in args], packed=pack_args(args), **texts)


ONE = prefix()


def test_query_etag_is_quoted_and_parses_back_even_with_a_gzip_suffix() -> None:
    tag = QueryTag(ONE, 255)
    assert tag.write() == f'"{ONE}.ff"' and tag.write(weak=True) == f'W/"{ONE}.ff"'
    assert read_tag(tag.write()[1:-1]) == tag
    assert read_tag(tag.write()[1:-1] + "-gzip") == tag


@pytest.mark.parametrize("text", ["", "x", "row:abc", ONE, f"{ONE}.", f"{ONE}.-1", f"{ONE}.1 "])
def test_foreign_tag_is_read_as_none(text: str) -> None:
    assert read_tag(text) is None
    assert read_tag(f"{ONE}.{'f' * 40}") is None


def test_every_part_of_a_query_instance_changes_the_tag_prefix() -> None:
    values: list[Value] = [1, 1.0, True, "1", b"1", U64(1), Decimal(1), None, Date("2026-01-01"), "2026-01-01"]
    values.append(Decimal("1.0"))
    others = [prefix((("1", value),)) for value in values]
    others += [prefix(**{name: "other"}) for name in ("db", "generation", "epoch", "sql", "format")]
    others += [prefix((("x", 1),)), prefix(())]
    assert len(set(others)) == len(others)
    assert prefix() == ONE


def test_tag_prefix_is_the_same_in_all_releases() -> None:
    assert ONE == "k2lKnnnDWsgeyuZt", "clients hold tags: increase FORMAT or EXTRACTOR if they must not match"


def test_adjacent_parts_of_an_instance_are_delimited_in_the_tag_prefix() -> None:
    assert prefix(db="a", generation="bc") != prefix(db="ab", generation="c")


def test_order_of_named_arguments_does_not_change_the_tag_prefix() -> None:
    assert instance_key("q", {"b": 1, "a": 2}) == instance_key("q", {"a": 2, "b": 1})
