"""Tags of answers: different questions have different prefixes, and foreign tags are rejected."""

from __future__ import annotations

from decimal import Decimal
from itertools import combinations

import msgspec
import pytest

from headwater.model.literal import U64, Date
from headwater.queries.dependencies.instances import instance_key
from headwater.queries.etag.query_etag import QueryIdentity, QueryTag, read_tag

ONE = QueryIdentity(db="main", generation="g", epoch="e", sql="SELECT ?", args=(("1", 1),), format="rows_json")


def test_query_etag_is_quoted_and_parses_back_even_with_a_gzip_suffix() -> None:
    tag = QueryTag(ONE.prefix, 255)
    assert tag.write() == f'"{ONE.prefix}.ff"' and tag.write(weak=True) == f'W/"{ONE.prefix}.ff"'
    assert read_tag(tag.write()[1:-1]) == tag
    assert read_tag(tag.write()[1:-1] + "-gzip") == tag


@pytest.mark.parametrize(
    "text", ["", "x", "row:abc", ONE.prefix, f"{ONE.prefix}.", f"{ONE.prefix}.-1", f"{ONE.prefix}.1 "]
)
def test_foreign_tag_is_read_as_none(text: str) -> None:
    assert read_tag(text) is None
    assert read_tag(f"{ONE.prefix}.{'f' * 40}") is None


def test_every_part_of_a_question_changes_the_prefix() -> None:
    values = [1, 1.0, True, "1", b"1", U64(1), Decimal(1), None, Date("2026-01-01"), "2026-01-01", Decimal("1.0")]
    others = [msgspec.structs.replace(ONE, args=(("1", value),)) for value in values]
    others += [
        msgspec.structs.replace(ONE, **{name: "other"})
        for name in ("db", "generation", "epoch", "sql", "format", "scope")
    ]
    others += [msgspec.structs.replace(ONE, args=(("x", 1),)), msgspec.structs.replace(ONE, args=())]
    for one, other in combinations(others, 2):
        assert one.prefix != other.prefix, (one, other)
    assert msgspec.structs.replace(ONE).prefix == ONE.prefix


def test_parts_of_a_question_are_delimited_in_the_prefix() -> None:
    one = msgspec.structs.replace(ONE, db="a", generation="bc")
    assert one.prefix != msgspec.structs.replace(ONE, db="ab", generation="c").prefix


def test_order_of_named_arguments_does_not_change_the_prefix() -> None:
    assert instance_key("q", {"b": 1, "a": 2}) == instance_key("q", {"a": 2, "b": 1})
