"""The Parquet history beyond the shared suite: other readers, replaced runs, crashes, refusals."""

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tests.pipeline.table_model import SPANS, Story, frame_of, row

from headwater.errors import ConfigError, SinkFenced, SinkUnfit
from headwater.model.keys.key import Span
from headwater.model.table import Column, Table
from headwater.pipeline.sinks.parquet.parquet import ParquetSink, open_parquet
from headwater.pipeline.sinks.registry import read_settings
from headwater.pipeline.sinks.sink import Part, Plan, Step
from headwater.pipeline.transform.schema import changes_schema, rows_schema


@pytest.fixture
def story() -> Story:
    told = Story()
    for key in (1, 2, 100):
        told.insert(row(key, f"n{key}"))
    return told


def parts_of(story: Story) -> list[Part]:
    return [Part(span, story.offset) for span in SPANS]


def test_parquet_reader_sees_only_the_newest_snapshot_and_its_changes(
    spark: SparkSession, tmp_path: Path, story: Story
) -> None:
    sink, path = ParquetSink(tmp_path / "lake"), str(tmp_path / "lake")
    for name in ("a1", "b2"):
        plan = story.plan(name)
        sink.begin(plan)
        sink.load(story.loading(spark, parts_of(story)), plan, parts_of(story))
    story.delete(2)
    sink.apply(story.changes(spark, 3, 4), story.step(plan, 3, 4), story.table)
    found = spark.read.parquet(path).select("id", "_change_type", "_offset", "snapshot").collect()
    assert sorted(map(tuple, found)) == [
        (1, "snapshot", 3, "b2"),
        (2, "delete", 4, "b2"),
        (2, "snapshot", 3, "b2"),
        (100, "snapshot", 3, "b2"),
    ]
    left = {name for name in os.listdir(path) if not name.startswith("snapshot=")}
    assert left == {"_headwater.json", "_headwater.lock"}


def test_column_names_with_dots_and_backticks_are_kept_in_parquet_files(spark: SparkSession, tmp_path: Path) -> None:
    table = Table("t", (Column("the.key", "i64"), Column("back`tick", "i64"), Column("a b", "i64")), ("the.key",))
    sink, plan = ParquetSink(tmp_path), Plan("p1", "g1", 1, (Span.all(),), table)
    sink.begin(plan)
    names = rows_schema(table).names[:3]
    sink.load(frame_of(spark, rows_schema(table), [[dict.fromkeys(names, 1)]]), plan, [Part(Span.all(), 1)])
    change = {**dict.fromkeys(names, 2), "_change_type": "insert", "_commit_version": 2, "_offset": 2, "_txn": "t"}
    sink.apply(frame_of(spark, changes_schema(table), [[change]]), Step("p1", "g1", 1, 2), table)
    files = [pq.ParquetFile(file).read() for file in sorted(tmp_path.rglob("*.parquet"))]
    assert [file.column_names for file in files] == [changes_schema(table).names] * 2
    assert [file.select(names).to_pylist() for file in files] == [[dict.fromkeys(names, n)] for n in (1, 2)]


def test_parquet_commit_of_a_replaced_plan_is_fenced_without_a_lock(
    spark: SparkSession, tmp_path: Path, story: Story
) -> None:
    """The replaced run checked the plan before the other run began, and commits after."""
    sink, other = ParquetSink(tmp_path), ParquetSink(tmp_path)
    old = story.plan("old")
    sink.begin(old)
    with sink._staged(story.changes(spark, 0, 3), "old") as (staging, reports):
        shutil.copytree(staging, tmp_path / "kept")
        other.begin(story.plan("new"))
        (tmp_path / "kept").rename(staging)
        from headwater.pipeline.sinks.parquet.parquet import Commit

        with pytest.raises(SinkFenced):
            sink._commit("old", "commit=step-3", staging, [report.file for report in reports], Commit(upto=9))
    assert not (tmp_path / "snapshot=old").exists()
    state = other.state()
    assert state and state.plan.id == "new" and state.offset == 3


def test_existing_parquet_commit_is_never_replaced(spark: SparkSession, tmp_path: Path, story: Story) -> None:
    from headwater.pipeline.sinks.parquet.parquet import Commit

    sink = ParquetSink(tmp_path)
    sink.begin(story.plan("p"))
    for upto in (4, 5):
        with sink._staged(story.changes(spark, 0, 3), "p") as (staging, reports):
            files = [report.file for report in reports]
            if upto == 4:
                sink._commit("p", "commit=step-3", staging, files, Commit(upto=upto))
            else:
                with pytest.raises(SinkFenced):
                    sink._commit("p", "commit=step-3", staging, files, Commit(upto=upto))
    state = sink.state()
    assert state and state.offset == 4


def test_staged_files_of_a_killed_run_are_invisible_and_removed_by_the_next_begin(
    spark: SparkSession, tmp_path: Path, story: Story
) -> None:
    sink = ParquetSink(tmp_path)
    plan = story.plan("p1")
    sink.begin(plan)
    (tmp_path / "_staging-dead").mkdir()
    (tmp_path / "_staging-dead" / "part-0.parquet").write_bytes(b"half a file")
    (tmp_path / "_old-dead").mkdir()
    sink.load(story.loading(spark, parts_of(story)), plan, parts_of(story))
    assert spark.read.parquet(str(tmp_path)).count() == 3
    sink.begin(story.plan("p2"))
    assert sorted(os.listdir(tmp_path)) == ["_headwater.json", "_headwater.lock", "snapshot=p2"]


def test_old_snapshot_left_by_a_killed_begin_is_removed_by_the_next_load(
    spark: SparkSession, tmp_path: Path, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the new plan by then, so no run begins it again."""
    sink = ParquetSink(tmp_path)
    old, new = story.plan("old"), story.plan("new")
    sink.begin(old)
    sink.load(story.loading(spark, parts_of(story)), old, parts_of(story))
    with monkeypatch.context() as killing, pytest.raises(KeyboardInterrupt):
        killing.setattr(ParquetSink, "_remove", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        sink.begin(new)
    state = sink.state()
    assert state and state.plan == new
    sink.load(story.loading(spark, parts_of(story)), new, parts_of(story))
    assert [name for name in os.listdir(tmp_path) if name.startswith("snapshot=")] == ["snapshot=new"]
    assert spark.read.parquet(str(tmp_path)).count() == 3


@pytest.mark.parametrize(
    "settings", [{"path": "lake", "mode": "upsert"}, {"path": "s3://bucket/lake"}, {"path": "hdfs://host/lake"}]
)
def test_parquet_sink_refuses_unsupported_settings_with_a_hint_to_delta(settings: dict[str, str]) -> None:
    with pytest.raises(SinkUnfit) as refused:
        open_parquet(settings)
    assert "delta" in refused.value.hint


def test_parquet_path_accepts_a_file_url_and_is_required(tmp_path: Path) -> None:
    assert open_parquet({"path": f"file://{tmp_path}"}).name == f"parquet {tmp_path}"
    for settings in ({}, {"path": "x", "colour": "red"}):
        with pytest.raises(ConfigError):
            read_settings("parquet", settings)
