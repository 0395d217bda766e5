"""The last change per key, and SCD2 versions of rows, against models in plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.pipeline.sinks.test_sink_contract import change
from tests.pipeline.table_model import TABLE, Story, frame_of, row

from headwater.errors import SinkUnfit
from headwater.model.table import Column, Table
from headwater.pipeline.failure import cause_of
from headwater.pipeline.transform.compaction import last_per_key, quoted, unused_name
from headwater.pipeline.transform.scd2 import versions
from headwater.pipeline.transform.schema import changes_schema, identity_of

Row = dict[str, Any]


def random_story(seed: int, count: int = 60) -> Story:
    story = Story()
    change(story, random.Random(seed), count)
    return story


def test_last_row_per_key_marks_deleted_keys(spark: SparkSession) -> None:
    for seed in range(3):
        story = random_story(seed)
        found = last_per_key(story.changes(spark, 0, story.offset), ["id"]).collect()
        assert len({each["id"] for each in found}) == len(found)
        assert {each["id"]: each["name"] for each in found if not each["_deleted"]} == {
            key: held["name"] for key, held in story.rows.items()
        }
        gone = {image["id"] for image in story.images} - story.rows.keys()
        assert {each["id"] for each in found if each["_deleted"]} == gone


def test_compaction_keeps_columns_whose_names_need_quoting(spark: SparkSession) -> None:
    odd = ("a.b", "back`tick", 'quo"te', "_deleted", "_offset", "_row", "Ünï côdé")
    table = Table("odd", (Column("the key", "str"), *(Column(name, "i64") for name in odd)), ("the key",))
    schema = changes_schema(table)
    told = {"_change_type": "insert", "_commit_version": 1, "__offset": 1, "_txn": "t"}
    frame = frame_of(spark, schema, [[{"the key": "k", **dict.fromkeys(odd, 7), **told}]])
    (found,) = last_per_key(frame, identity_of(table)).collect()
    assert list(found.asDict()) == [*schema.names, "__deleted"]
    assert [found[name] for name in odd] == [7] * len(odd)
    assert found["__deleted"] is False
    (version,) = [each for each in versions(frame, identity_of(table)).collect() if each["_action"] == "open"]
    assert [version[name] for name in odd] == [7] * len(odd)


def test_compaction_compares_composite_keys_by_all_columns(spark: SparkSession) -> None:
    table = Table("pairs", (Column("a", "i64"), Column("b", "bytes"), Column("v", "str")), ("a", "b"))
    about = {"_change_type": "insert", "_commit_version": 9, "_txn": "t"}
    told = [(1, b"x", 1), (1, b"y", 2), (2, b"x", 3), (1, b"x", 4)]
    rows = [{"a": a, "b": b, "v": str(offset), "_offset": offset, **about} for a, b, offset in told]
    found = last_per_key(frame_of(spark, changes_schema(table), [rows[:2], rows[2:]]), ["a", "b"]).collect()
    assert {(each["a"], bytes(each["b"])): each["v"] for each in found} == {
        (1, b"x"): "4",
        (1, b"y"): "2",
        (2, b"x"): "3",
    }


@pytest.mark.parametrize("act", [last_per_key, versions])
def test_null_key_is_refused_with_its_column_name(spark: SparkSession, act: Any) -> None:
    image = row(1) | {"id": None, "_change_type": "insert", "_commit_version": 1, "_offset": 1, "_txn": "t"}
    frame = frame_of(spark, changes_schema(TABLE), [[image]])
    with pytest.raises(Exception) as raised:
        act(frame, ["id"]).collect()
    cause = cause_of(raised.value)
    assert isinstance(cause, SinkUnfit)
    assert "'id'" in cause.message
    assert "primary key" in cause.hint


def test_compaction_shuffles_once_and_a_single_partition_is_not_shuffled(spark: SparkSession) -> None:
    story = random_story(0, 5)
    several = story.changes(spark, 0, story.offset)
    assert shuffles(last_per_key(several, ["id"])) == 1
    assert shuffles(last_per_key(several.coalesce(1), ["id"])) == 0
    assert shuffles(versions(several, ["id"])) == 1


def shuffles(frame: DataFrame) -> int:
    plan: str = frame._jdf.queryExecution().executedPlan().toString()
    return plan.count("Exchange ")


def test_free_column_name_differs_from_existing_names_in_any_case() -> None:
    assert unused_name("_x", ["_X", "__x"]) == "___x"
    assert quoted("a`b") == "`a``b`"


# Versions


def modelled(story: Story, after: int, upto: int) -> tuple[list[tuple[Any, ...]], dict[int, Any]]:
    """Return the versions opened in (after, upto] as (key, offset, to), and the end of each key's earlier version."""
    opened: list[list[Any]] = []
    current: dict[int, list[Any]] = {}
    closed: dict[int, Any] = {}
    for image in story.images:
        if not after < image["_offset"] <= upto:
            continue
        key, time = image["id"], image["_commit_timestamp"]
        closed.setdefault(key, time)
        if key in current:
            current.pop(key)[2] = time
        if image["_change_type"] in ("insert", "update_postimage"):
            current[key] = [key, image["_offset"], None]
            opened.append(current[key])
    return sorted(map(tuple, opened), key=str), closed


def test_scd2_versions_of_random_changes_match_a_simple_model(spark: SparkSession) -> None:
    for seed in range(3):
        story = random_story(seed)
        found = versions(story.changes(spark, 10, 50), ["id"]).toArrow().to_pylist()
        opened, closed = modelled(story, 10, 50)
        mine = [each for each in found if each["_action"] == "open"]
        assert sorted(((each["id"], each["_offset"], each["_valid_to"]) for each in mine), key=str) == opened
        assert all(each["_is_current"] == (each["_valid_to"] is None) for each in mine)
        ends = [each for each in found if each["_action"] == "close"]
        assert {each["id"]: each["_valid_to"] for each in ends} == closed
        assert len(ends) == len(closed)
