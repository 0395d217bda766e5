"""Delta sinks only: fences and crashes, SCD2, odd names, other writers, both engines on one table."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from tests.pipeline.sinks.sink_targets import FACTORIES, DeltaTarget
from tests.pipeline.sinks.test_sink_contract import apply, begun, change, load, state_of
from tests.pipeline.table_model import SPANS, TABLE, Story, canon, frame_of, row

from headwater.errors import ConfigError, SinkFenced, SinkUnfit
from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.pipeline.sinks.delta import delta
from headwater.pipeline.sinks.delta.delta import DeltaSink, Settings
from headwater.pipeline.sinks.delta.delta_spark import merge_sql
from headwater.pipeline.sinks.delta.layout import OVER, STATISTICS, merge_of, part_app, step_app
from headwater.pipeline.sinks.delta.merge import TooLarge
from headwater.pipeline.sinks.delta.part import DONE, FENCED, UNFIT, PartWriter, TableLocation
from headwater.pipeline.sinks.registry import is_exactly_once, open_sink, read_settings
from headwater.pipeline.sinks.sink import HISTORY, UPSERT, Part, Plan, State, Step
from headwater.pipeline.spark.part_ends import ended, with_end
from headwater.pipeline.transform.schema import changes_schema, rows_schema

EVERY_CI_RUN = pytest.mark.soak(seconds=30, every_time=True)
Row = dict[str, Any]


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def story_of_inserts(count: int = 5) -> Story:
    """Return a story in which `count` rows were inserted."""
    story = Story()
    for key in range(count):
        story.insert(row(key * 30, f"n{key}"))
    return story


def writer_of(place: str, plan: Plan, *parts: Part, mode: str = UPSERT) -> PartWriter:
    return PartWriter(TableLocation(place), plan, parts, mode, 1 << 26)


def batches(story: Story, part: Part) -> Any:
    return told_to_the_end(story.part_rows(part))


def told_to_the_end(rows: list[Row]) -> Any:
    schema = rows_schema(TABLE)
    return ended(iter(pa.Table.from_pylist(rows, schema).to_batches(max_chunksize=2)), with_end(schema))


def rows_of(place: str) -> list[Row]:
    """Return the rows of the Delta table at `place`."""
    found: list[Row] = DeltaTable(place).to_pyarrow_table().to_pylist()
    return found


def elsewhere(act: Callable[[], object]) -> None:
    """Run `act` in another thread: delta-rs cannot be called while it pulls rows."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


# Parts, without Spark: what a task does


def test_two_concurrent_attempts_of_a_part_commit_it_once_and_both_report_done(place: str) -> None:
    story = story_of_inserts()
    plan = story.plan("p1")
    DeltaSink(Settings(place)).begin(plan)
    part = Part(SPANS[0], story.offset)
    writer = writer_of(place, plan, part)
    second = batches(story, part)

    def first_then_second() -> Any:
        """Yield the rows of an attempt that another attempt overtakes while it writes."""
        yield from second
        elsewhere(lambda: writer.write(part, batches(story, part)))

    assert writer.write(part, first_then_second()) == (DONE, "")
    assert len(rows_of(place)) == len(story.part_rows(part))
    assert DeltaTable(place).transaction_version(part_app("p1", part.span)) == story.offset


def test_parts_committed_at_the_same_moment_all_succeed(place: str) -> None:
    story = story_of_inserts()
    bounds = [b"", *(encode_key((key,)) for key in range(10, 120, 10)), None]
    spans = [Span(low or b"", high) for low, high in zip(bounds, bounds[1:], strict=False)]
    plan = story.plan("p1", spans)
    DeltaSink(Settings(place)).begin(plan)
    parts = [Part(span, story.offset) for span in spans]
    writer, together, said = writer_of(place, plan, *parts), threading.Barrier(len(parts)), []

    def write(part: Part) -> None:
        together.wait()
        said.append(writer.write(part, batches(story, part)))

    threads = [threading.Thread(target=write, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [(DONE, "")] * len(parts)
    assert canon(rows_of(place)) == canon(list(story.rows.values()))
    assert state_of(DeltaSink(Settings(place))).missing == []


def test_task_is_fenced_when_a_new_plan_begins_during_its_write(place: str) -> None:
    story = story_of_inserts()
    old, new = story.plan("p1"), story.plan("p2")
    sink = DeltaSink(Settings(place))
    sink.begin(old)
    part = Part(SPANS[0], story.offset)

    def rows() -> Any:
        yield from batches(story, part)
        elsewhere(lambda: sink.begin(new))

    assert writer_of(place, old, part).write(part, rows()) == (FENCED, "")
    assert rows_of(place) == []
    assert writer_of(place, old, part).write(part, batches(story, part)) == (FENCED, "")


def test_snapshot_row_with_a_null_key_is_refused_with_the_column_name(place: str) -> None:
    plan, part = story_of_inserts().plan("p1"), Part(SPANS[0], 1)
    DeltaSink(Settings(place)).begin(plan)
    bad = told_to_the_end([row(1), row(2) | {"id": None}])
    assert writer_of(place, plan, part).write(part, bad) == (UNFIT, "id")
    assert rows_of(place) == []


def test_failed_row_source_leaves_no_rows_in_the_delta_table(place: str) -> None:
    story = story_of_inserts()
    plan, part = story.plan("p1"), Part(SPANS[0], 5)
    DeltaSink(Settings(place)).begin(plan)

    def broken() -> Any:
        yield from batches(story, part)
        raise ConnectionResetError("the server went away")

    with pytest.raises(Exception, match="went away"):
        writer_of(place, plan, part).write(part, broken())
    assert rows_of(place) == []
    assert state_of(DeltaSink(Settings(place))).missing == list(SPANS)


@pytest.mark.parametrize("batches_that_came", [0, 1, 2])
def test_truncated_row_source_leaves_no_rows_in_the_delta_table(place: str, batches_that_came: int) -> None:
    """When the feeder of a task dies, Spark closes the task's stream as at its regular end."""
    story = story_of_inserts()
    plan, part = story.plan("p1"), Part(SPANS[0], 5)
    DeltaSink(Settings(place)).begin(plan)
    with pytest.raises(Exception, match="truncated after"):
        writer_of(place, plan, part).write(part, itertools.islice(batches(story, part), batches_that_came))
    assert rows_of(place) == []
    assert state_of(DeltaSink(Settings(place))).missing == list(SPANS)


@pytest.mark.slow
def test_append_racing_with_a_new_plan_leaves_no_rows_in_the_table(place: str) -> None:
    story = story_of_inserts()
    sink, part = DeltaSink(Settings(place)), Part(SPANS[0], story.offset)
    sink.begin(story.plan("p0"))
    for number in range(1, 15):
        old, new = story.plan(f"p{number - 1}"), story.plan(f"p{number}")
        together = threading.Barrier(2)

        def write(old: Plan = old, together: threading.Barrier = together) -> None:
            together.wait()
            writer_of(place, old, part).write(part, batches(story, part))

        thread = threading.Thread(target=write)
        thread.start()
        together.wait()
        sink.begin(new)
        thread.join()
        assert rows_of(place) == []
        assert state_of(sink) == State(new, story.offset)


def test_replaced_plan_is_marked_as_over_for_merges_by_spark(place: str) -> None:
    story, sink = story_of_inserts(), DeltaSink(Settings(place))
    sink.begin(story.plan("p1"))
    assert DeltaTable(place).transaction_version(step_app("p1")) is None
    sink.begin(story.plan("p2"))
    assert DeltaTable(place).transaction_version(step_app("p1")) == OVER
    sink.begin(story.plan("p2"))
    assert DeltaTable(place).transaction_version(step_app("p2")) is None


def test_plan_begun_between_check_and_commit_of_another_plan_is_marked_as_over(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, sink, other = story_of_inserts(), DeltaSink(Settings(place)), DeltaSink(Settings(place))
    sink.begin(story.plan("p1"))
    replaced = sink._replaced

    def late(before: DeltaTable | None, plan: Plan) -> bool:
        monkeypatch.undo()
        other.begin(story.plan("p2"))
        return replaced(before, plan)

    monkeypatch.setattr(sink, "_replaced", late)
    sink.begin(story.plan("p3"))
    assert [DeltaTable(place).transaction_version(step_app(name)) for name in ("p1", "p2", "p3")] == [OVER, OVER, None]


CHILD = """
import sys
from tests.pipeline.sinks.test_delta import story_of_inserts, batches, writer_of
from tests.pipeline.table_model import Part, SPANS
from headwater.pipeline.sinks.delta.delta import DeltaSink, Settings
place, story = sys.argv[1], story_of_inserts()
sink = DeltaSink(Settings(place))
if sink.state() is None:
    sink.begin(story.plan("p1"))
print("go", flush=True)
plan = sink.state().plan
for span in sink.state().missing:
    part = Part(span, story.offset)
    print(writer_of(place, plan, part).write(part, batches(story, part)), flush=True)
print("end", flush=True)
"""


@pytest.mark.slow
def test_loader_killed_at_any_moment_is_resumed_by_the_next_loader(place: str) -> None:
    dice = random.Random(7)
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", CHILD, place], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        timer = threading.Timer(dice.random() * 0.03, os.kill, (child.pid, signal.SIGKILL))
        timer.start()
        rest = child.stdout.read()
        timer.cancel()
        child.wait()
        child.stdout.close()
        if rest.endswith("end\n"):
            break
    subprocess.run([sys.executable, "-c", CHILD, place], check=True, stdout=subprocess.DEVNULL)
    story = story_of_inserts()
    assert state_of(DeltaSink(Settings(place))) == State(
        story.plan("p1"), story.offset, dict.fromkeys(SPANS, story.offset)
    )
    assert canon(rows_of(place)) == canon(list(story.rows.values()))


# Refusals


def test_table_with_rows_of_no_pipeline_is_refused_and_keeps_them(place: str) -> None:
    write_deltalake(place, pa.table({"precious": [1]}))
    with pytest.raises(SinkUnfit, match="no pipeline wrote"):
        DeltaSink(Settings(place)).begin(story_of_inserts().plan("p1"))
    assert rows_of(place) == [{"precious": 1}]


def test_evolve_to_a_changed_type_or_key_is_refused_with_a_reset_hint(place: str) -> None:
    sink = DeltaSink(Settings(place))
    sink.begin(story_of_inserts().plan("p1"))
    other = tuple(Column(each.name, "f64" if each.name == "name" else each.kind) for each in TABLE.columns)
    with pytest.raises(SinkUnfit, match="'name'") as raised:
        sink.evolve(Table("t", other, ("id",), 2))
    assert "reset" in raised.value.hint
    with pytest.raises(SinkUnfit, match="key of table"):
        sink.evolve(Table("t", TABLE.columns, ("name",), 2))
    assert state_of(sink).plan.table == TABLE


def test_table_properties_set_by_users_are_kept(place: str) -> None:
    sink = DeltaSink(Settings(place, change_data_feed=True, checkpoint_every=7))
    sink.begin(story_of_inserts().plan("p1"))
    DeltaTable(place).alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    sink.begin(story_of_inserts().plan("p2"))
    found = DeltaTable(place).metadata().configuration
    assert found["delta.logRetentionDuration"] == "interval 60 days"
    assert found["delta.enableChangeDataFeed"] == "true"
    assert found["delta.checkpointInterval"] == "7"


@pytest.mark.parametrize(
    "settings", [{}, {"path": "x", "pth": 1}, {"path": "x", "mode": "append"}, {"path": "x", "file_bytes": "many"}]
)
def test_invalid_delta_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="delta sink"):
        read_settings("delta", settings)


def test_unknown_sink_kind_is_refused_with_the_nearest_name() -> None:
    assert is_exactly_once("delta") and is_exactly_once("delta-spark") and not is_exactly_once("kafka")
    with pytest.raises(ConfigError) as raised:
        open_sink("dleta", {}, name="t", spark=None)  # type: ignore[arg-type]
    assert "'delta'" in raised.value.hint


def test_delta_sink_hides_its_storage_secrets(place: str) -> None:
    sink = DeltaSink(Settings(place, storage_options={"AWS_SECRET_ACCESS_KEY": "hush"}))
    assert "hush" not in repr(sink._location) + sink.name + repr(sink)


def test_merge_sql_quotes_names_and_nulls_dropped_columns() -> None:
    text = merge_sql("/lake/`x`", "view", merge_of(TABLE, UPSERT, [*rows_schema(TABLE).names, "gone"]))
    assert text.startswith(
        "MERGE INTO delta.`/lake/``x``` t USING view s ON t.`id` = s.`id` WHEN MATCHED AND s.`_deleted`"
    )
    assert "`gone` = NULL" in text


# Steps


def test_step_too_large_for_the_driver_is_applied_in_pieces(
    spark: SparkSession, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, sink = story_of_inserts(), DeltaSink(Settings(place))
    plan = begun(spark, sink, story)
    for number in range(40):
        story.update(0, row(0, f"v{number}"))
        story.insert(row(1000 + number))
    real, sizes = delta.collect, []

    def small(source: Any) -> pa.Table:
        rows = real(source)
        sizes.append(rows.num_rows)
        if rows.num_rows > 30:
            raise TooLarge
        return rows

    monkeypatch.setattr(delta, "collect", small)
    apply(spark, sink, story, plan, 5, story.offset)
    assert max(sizes) > 30
    assert state_of(sink).offset == story.offset
    assert canon(rows_of(place)) == canon(list(story.rows.values()))
    monkeypatch.setattr(delta, "collect", lambda source: (_ for _ in ()).throw(TooLarge))
    story.delete(0)
    with pytest.raises(SinkUnfit, match="maxResultSize"):
        apply(spark, sink, story, plan, story.offset - 1, story.offset)


def test_files_without_the_keys_of_a_step_are_not_rewritten(spark: SparkSession, place: str) -> None:
    story, sink = story_of_inserts(), DeltaSink(Settings(place))
    plan = begun(spark, sink, story)
    before = set(DeltaTable(place).file_uris())
    story.update(120, row(120, "changed"))
    apply(spark, sink, story, plan, 5, 6)
    assert len(before & set(DeltaTable(place).file_uris())) == 1


def test_sink_state_survives_optimize_vacuum_cleanup_and_foreign_commits(spark: SparkSession, place: str) -> None:
    story, sink = story_of_inserts(), DeltaSink(Settings(place, checkpoint_every=3))
    plan = begun(spark, sink, story)
    story.update(0, row(0, "one"))
    apply(spark, sink, story, plan, 5, 6)
    table = DeltaTable(place)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    for number in range(4):
        DeltaTable(place).alter.set_table_properties({"delta.appendOnly": "false" if number % 2 else "FALSE"})
    DeltaTable(place).create_checkpoint()
    DeltaTable(place).cleanup_metadata()
    assert not (Path(place) / "_delta_log" / "00000000000000000001.json").exists()
    assert state_of(DeltaSink(Settings(place))) == State(plan, 6)
    story.delete(30)
    apply(spark, DeltaSink(Settings(place)), story, plan, 6, 7)
    assert canon(rows_of(place)) == canon(list(story.rows.values()))


def test_small_files_are_compacted_and_the_change_data_feed_is_readable(spark: SparkSession, place: str) -> None:
    story, sink = story_of_inserts(), DeltaSink(Settings(place, maintain_every=2, change_data_feed=True))
    plan = begun(spark, sink, story)
    for number in range(4):
        story.insert(row(1000 + number))
        apply(spark, sink, story, plan, story.offset - 1, story.offset)
    assert "OPTIMIZE" in {each["operation"] for each in DeltaTable(place).history()}
    assert canon(rows_of(place)) == canon(list(story.rows.values()))
    story.update(0, row(0, "changed"))
    story.delete(30)
    apply(spark, sink, story, plan, story.offset - 2, story.offset)
    merged = next(each["version"] for each in DeltaTable(place).history() if each["operation"] == "MERGE")
    cdf = pa.table(DeltaTable(place).load_cdf(merged, merged).read_all())
    assert sorted(cdf.column("_change_type").to_pylist()) == ["delete", "update_postimage", "update_preimage"]


def test_maintenance_is_on_by_default_and_keeps_rows_and_state(spark: SparkSession, place: str) -> None:
    assert Settings(place).maintain_every == 100
    story, sink = story_of_inserts(), DeltaSink(Settings(place, maintain_every=4))
    plan = begun(spark, sink, story)
    made = DeltaTable(place).version()
    for number in range(6):
        story.insert(row(1000 + number))
        apply(spark, sink, story, plan, story.offset - 1, story.offset)
        assert state_of(DeltaSink(Settings(place))) == State(plan, story.offset)
        assert canon(rows_of(place)) == canon(list(story.rows.values()))
    done = [each["operation"] for each in DeltaTable(place).history()]
    assert 1 <= done.count("OPTIMIZE") < 6
    assert len(DeltaTable(place).file_uris()) < 6
    before = DeltaTable(place, version=made)  # within the retention every file of old versions is still there
    assert pa.table(before.to_pyarrow_table()).num_rows == 5
    held_for = {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    DeltaTable(place).alter.set_table_properties(held_for, raise_if_not_exists=False)
    for number in range(4):
        story.update(0, row(0, f"v{number}"))
        apply(spark, sink, story, plan, story.offset - 1, story.offset)
    assert "VACUUM END" in {each["operation"] for each in DeltaTable(place).history()}
    assert state_of(DeltaSink(Settings(place))) == State(plan, story.offset)
    assert canon(rows_of(place)) == canon(list(story.rows.values()))


def test_overdue_maintenance_runs_and_failed_maintenance_raises_no_error(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DeltaSink(Settings(place, maintain_every=10))
    sink.begin(story_of_inserts().plan("p1"))
    sink._seen = 9
    assert [sink._is_due(version) for version in (9, 12, 13, 19, 20, 41)] == [False, True, False, False, True, True]
    sink._seen, tried = -1, []

    def fail(*_: object, **__: object) -> None:
        tried.append(1)
        raise OSError("nothing may be removed here")

    monkeypatch.setattr(DeltaTable, "vacuum", fail)
    for _ in range(2):
        sink._maintain()
    assert tried == [1]


def test_column_names_that_need_quoting_are_merged_by_delta(spark: SparkSession, place: str) -> None:
    odd = ("a.b", "back`tick", 'quo"te', "_deleted", "_offset", "select", "Ünï côdé", "sp ace,;{}()=")
    for mode in (UPSERT, HISTORY):
        table = Table("odd", (Column("the.key", "i64"), *(Column(name, "i64") for name in odd)), ("the.key",))
        sink = DeltaSink(Settings(place + mode, mode))
        plan = Plan("p1", "g1", 1, (Span.all(),), table)
        sink.begin(plan)
        rows = [{"the.key": 1, **dict.fromkeys(odd, 1)}, {"the.key": 2, **dict.fromkeys(odd, 2)}]
        sink.load(frame_of(spark, rows_schema(table), [rows], ends=True), plan, [Part(Span.all(), 1)])
        about = {"_commit_version": 2, "__offset": 2, "_txn": "t"}
        changes = [
            {"the.key": 1, **dict.fromkeys(odd, 5), "_change_type": "update_postimage", **about},
            {"the.key": 2, **dict.fromkeys(odd, 2), "_change_type": "delete", **about, "__offset": 3},
        ]
        sink.apply(frame_of(spark, changes_schema(table), [changes]), Step("p1", "g1", 1, 3), table)
        current = [each for each in rows_of(place + mode) if each.get("_is_current", True)]
        assert [[each[name] for name in ("the.key", *odd)] for each in current] == [[1] + [5] * len(odd)]


def test_columns_not_chosen_are_null(spark: SparkSession, place: str) -> None:
    story, sink = story_of_inserts(2), DeltaSink(Settings(place))
    plan = story.plan("p1", (Span.all(),))
    sink.begin(plan)
    part = Part(Span.all(), 2)
    sink.load(story.loading(spark, [part], ends=True).select("id", "_misfit", "_end"), plan, [part])
    story.insert(row(7, "seven"))
    frame = story.changes(spark, 2, 3)
    sink.apply(frame.drop("name"), story.step(plan, 2, 3), TABLE)
    assert canon(rows_of(place)) == canon([row(key, None) for key in (0, 30, 7)])


# History


def modelled(story: Story, plan: Plan, version: int, upto: int) -> list[tuple[Any, ...]]:
    """Return every version of every row: key, name, offset, change type, end, whether current."""
    found: list[list[Any]] = []
    current: dict[int, list[Any]] = {}

    def open_(held: Row, offset: int, kind: str) -> None:
        current[held["id"]] = [held["id"], held["name"], offset, kind, None, True]
        found.append(current[held["id"]])

    for held_row in story.rows_at[version].values():
        open_(held_row, version, "snapshot")
    for image in story.images:
        if version < image["_offset"] <= upto:
            if image["id"] in current:
                current.pop(image["id"])[4:] = [image["_commit_timestamp"], False]
            if image["_change_type"] in ("insert", "update_postimage"):
                open_(image, image["_offset"], image["_change_type"])
    return sorted(map(tuple, found), key=str)


@pytest.mark.parametrize("kind", ["delta", pytest.param("delta-spark", marks=EVERY_CI_RUN)])
def test_delta_history_holds_every_version_of_the_model(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    next(each for each in FACTORIES if each.name == f"{kind}-{HISTORY}").require()
    target, dice, story = DeltaTarget(spark, tmp_path, HISTORY, kind), random.Random(3), Story()
    change(story, dice, 10)
    sink = target.sink()
    plan = begun(spark, sink, story)
    done = 10
    for size in (1, 7, 12):
        change(story, dice, size)
        apply(spark, sink, story, plan, dice.randint(10, done), story.offset)
        done = story.offset
    names = ("id", "name", "_offset", "_change_type", "_valid_to", "_is_current")
    mine = [tuple(each[name] for name in names) for each in target.stored_rows()]
    assert sorted(mine, key=str) == modelled(story, plan, 10, done)
    times = {image["_offset"]: image["_commit_timestamp"] for image in story.images}
    for each in target.stored_rows():
        is_first = each["_change_type"] == "snapshot"
        assert each["_valid_from"] is not None
        assert is_first or each["_valid_from"] == times[each["_offset"]]
        assert each["_txn"] == (None if is_first else f"t{each['_offset']}")
        assert each["_commit_version"] == each["_offset"]


def test_longer_step_merged_after_a_shorter_step_repeats_no_version(spark: SparkSession, tmp_path: Path) -> None:
    """As when another driver commits between the check of the sink and the start of Spark's merge."""
    target, dice, story = DeltaTarget(spark, tmp_path, HISTORY), random.Random(5), Story()
    change(story, dice, 8)
    sink = target.sink()
    plan = begun(spark, sink, story)
    change(story, dice, 20)
    start = story.rows_at.index(story.rows_at[8])
    apply(spark, sink, story, plan, start, 15)
    table = DeltaTable(str(target.path))
    names = [field.name for field in table.schema().fields]
    from headwater.pipeline.transform.scd2 import versions

    source = versions(story.changes(spark, 8, story.offset), ["id"])
    late = DeltaSink(Settings(str(target.path), HISTORY))
    assert late._merged(source, story.step(plan, 8, story.offset), merge_of(TABLE, HISTORY, names), table)
    wanted = ("id", "name", "_offset", "_change_type", "_valid_to", "_is_current")
    mine = [tuple(each[name] for name in wanted) for each in target.stored_rows()]
    assert sorted(mine, key=str) == modelled(story, plan, 8, story.offset)


# Two engines


@EVERY_CI_RUN
@pytest.mark.parametrize("mode", [UPSERT, HISTORY])
def test_delta_rs_and_delta_spark_alternate_on_the_same_table_without_loss(
    spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    next(each for each in FACTORIES if each.name == f"delta-spark-{mode}").require()
    rust, jvm = (DeltaTarget(spark, tmp_path, mode, kind) for kind in ("delta", "delta-spark"))
    dice, story = random.Random(11), story_of_inserts()
    first, second = rust.sink(), jvm.sink()
    plan = story.plan("p1")
    second.begin(plan)
    load(spark, first, story, plan, Part(SPANS[0], 5))
    load(spark, second, story, plan, Part(SPANS[1], 5))
    for sink in (second, first, second, second, first):
        change(story, dice, 4)
        after = state_of(sink).offset
        apply(spark, sink, story, plan, after, story.offset)
        assert state_of(first) == state_of(second) == State(plan, story.offset)
        assert canon(rust.rows()) == canon(list(story.rows.values()))
    spark_rows = spark.read.format("delta").load(str(rust.path)).where("true" if mode == UPSERT else "_is_current")
    assert spark_rows.count() == len(story.rows)
    first.begin(story.plan("p2"))
    with pytest.raises(SinkFenced):
        apply(spark, second, story, plan, story.offset, story.offset + 1)


def test_spark_merge_of_a_plan_that_ended_meanwhile_writes_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan ends after the sink looked, and before Spark opens the table."""
    next(each for each in FACTORIES if each.name == f"delta-spark-{UPSERT}").require()
    target, story = DeltaTarget(spark, tmp_path, UPSERT, "delta-spark"), story_of_inserts()
    sink, other = target.sink(), target.sink()
    plan = begun(spark, sink, story)
    story.insert(row(7))
    merged: Callable[..., bool] = sink._merged  # type: ignore[attr-defined]

    def late(*args: Any) -> bool:
        other.begin(story.plan("p2"))
        monkeypatch.undo()
        return merged(*args)

    monkeypatch.setattr(sink, "_merged", late)
    with pytest.raises(SinkFenced):
        apply(spark, sink, story, plan, 5, 6)
    assert target.rows() == []
    assert state_of(other).plan.id == "p2"


def test_delta_spark_refuses_column_names_it_cannot_write(spark: SparkSession, tmp_path: Path) -> None:
    next(each for each in FACTORIES if each.name == f"delta-spark-{UPSERT}").require()
    sink = DeltaTarget(spark, tmp_path, UPSERT, "delta-spark").sink()
    table = Table("t", (Column("id", "i64"), Column("two words", "str")), ("id",))
    with pytest.raises(SinkUnfit, match="two words"):
        sink.begin(Plan("p1", "g1", 1, (Span.all(),), table))


# Typed columns

LONG = Column("long", "dec", "numeric(18,2)")
SHORT = Table("n", (Column("id", "i64"), Column("a`b, c", "str"), Column("price", "dec", "numeric(15,2)")), ("id",))
WIDER = Table("n", (*SHORT.columns, LONG, Column("at", "datetime", "timestamp without time zone")), ("id",), version=2)


def typed_plan(id: str, table: Table) -> Plan:
    return Plan(id, "g1", 1, (Span.all(),), table, types="typed")


def write(place: str, plan: Plan, *rows: Row) -> None:
    schema = rows_schema(plan.table, types="typed")
    frames = iter(pa.Table.from_pylist(list(rows), schema).to_batches())
    part = Part(Span.all(), 1)
    assert writer_of(place, plan, part).write(part, ended(frames, with_end(schema))) == (DONE, "")


def test_long_number_is_found_by_readers_that_skip_files(place: str) -> None:
    """The bounds that delta-rs writes for this number are below it."""
    number, plan = Decimal("90071992547409.93"), typed_plan("p1", WIDER)
    DeltaSink(Settings(place)).begin(plan)
    write(place, plan, {"id": 1, "long": number, "price": Decimal("1.50")})
    rows = DeltaTable(place).to_pyarrow_dataset()
    assert rows.count_rows(filter=ds.field("long") == pa.scalar(number, pa.decimal128(18, 2))) == 1
    ((least,),) = [DeltaTable(place).get_add_actions(flatten=False).column("min").to_pylist()]
    assert {name for name, value in least.items() if value is not None} == {"id", "price"}


def test_statistics_follow_the_columns_and_a_choice_of_the_user_is_kept(place: str) -> None:
    sink, columns = DeltaSink(Settings(place)), "`id`,`a``b, c`,`price`,`_misfit`"
    sink.begin(typed_plan("p1", SHORT))
    assert STATISTICS not in DeltaTable(place).metadata().configuration
    sink.evolve(WIDER)
    assert DeltaTable(place).metadata().configuration[STATISTICS] == f"{columns},`at`"
    sink.begin(typed_plan("p2", SHORT))
    assert STATISTICS not in DeltaTable(place).metadata().configuration
    DeltaTable(place).alter.set_table_properties({STATISTICS: "id"})
    sink.begin(typed_plan("p3", SHORT))
    assert DeltaTable(place).metadata().configuration[STATISTICS] == "id"
    sink.begin(typed_plan("p4", WIDER))
    assert DeltaTable(place).metadata().configuration[STATISTICS] == "`id`,`a``b, c`,`price`,`at`,`_misfit`"


def test_column_of_times_without_a_zone_is_added_to_a_table_of_the_oldest_protocol(place: str) -> None:
    sink = DeltaSink(Settings(place))
    sink.begin(typed_plan("p1", SHORT))
    assert DeltaTable(place).protocol().min_reader_version == 1
    sink.evolve(WIDER)
    at = datetime(2026, 1, 31, 10)
    write(place, typed_plan("p1", WIDER), {"id": 1, "at": at})
    assert [row["at"] for row in rows_of(place)] == [at]
    assert "timestampNtz" in (DeltaTable(place).protocol().reader_features or ())
