"""Verification: any damage is found and repaired in its range alone, and equal rows are never reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from tests.conformance.live_server import Live
from tests.pipeline.lakes import Lake

from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.pipeline.run.table_report import Difference
from headwater.pipeline.verify import compare
from headwater.pipeline.verify.compare import comparable
from headwater.pipeline.verify.verify import as_held

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def lake(spark: SparkSession, server: Live, tmp_path: Path) -> Lake:
    made = Lake(spark, server, tmp_path)
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, w TEXT)")
    server.sql("INSERT INTO t VALUES " + ",".join(f"({n}, 'v{n}', NULL)" for n in range(1, 101)))
    made.carry()
    return made


def bad_places(report: Any) -> list[int]:
    return [place for place, each in enumerate(report.ranges) if not each.is_good]


def append(lake: Lake, *rows: dict[str, Any]) -> None:
    table = lake.table()
    write_deltalake(table, pa.Table.from_pylist(list(rows), pa.schema(table.schema().to_arrow())), mode="append")


@pytest.mark.soak(seconds=35, every_time=True)
def test_damage_is_found_and_repaired_only_in_its_range(lake: Lake) -> None:
    good = lake.verify()
    assert good.is_good and len(good.ranges) > 3 and good.rows == 100
    assert lake.task().verified_through == good.offset
    row = {"id": 42, "v": "v42", "w": None, "_misfit": None}

    def place(id: int) -> int:
        return next(n for n, each in enumerate(good.ranges) if each.span.contains(encode_key((id,))))

    def found(*ids: int) -> bool:
        report = lake.verify()
        return not report.is_good and bad_places(report) == [place(id) for id in ids]

    lake.table().update(predicate="id = 5", new_values={"v": "wrong"})
    assert found(5)
    swapped = "CASE WHEN id = 41 THEN 'v42' WHEN id = 42 THEN 'v41' ELSE v END"
    lake.table().update(predicate="id = 5", new_values={"v": "v5"})
    lake.table().update(predicate="id IN (41, 42)", updates={"v": swapped})
    lake.table().update(predicate="id = 95", updates={"w": "v", "v": "NULL"})  # moved by one column
    assert found(42, 95)
    lake.table().delete("id = 6")
    append(lake, row, row, {**row, "v": "other"}, {**row, "id": 1_000_000})
    before = lake.table().version()
    report = lake.verify(repair=True)
    assert bad_places(report) == [place(6), place(42), place(95)] and report.repaired == 3 and report.is_good
    told = [each.difference for each in report.bad]
    assert told == [
        Difference(missing=1, examples=("6",)),
        Difference(extra=3, different=2, examples=("41", "42")),
        Difference(extra=1, different=1, examples=("95", "1000000")),
    ]
    assert lake.is_equal() and lake.verify().is_good
    done = [each["operationMetrics"] for each in lake.table().history(lake.table().version() - before)]
    touched = ("num_target_rows_inserted", "num_target_rows_updated", "num_target_rows_deleted")
    assert sum(int(metrics[name]) for metrics in done for name in touched) <= 10
    lake.server.sql("UPDATE t SET v = 'goes on' WHERE id = 42")
    lake.carry()
    assert lake.is_equal()


def test_sink_that_advances_during_verify_is_compared_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = compare.digests
    first = lake.carry().offset

    def slow(frame: Any) -> Any:
        monkeypatch.setattr(compare, "digests", digests)
        found = digests(frame)
        lake.server.sql("UPDATE t SET v = 'moved' WHERE id < 50")
        lake.carry()
        return found

    monkeypatch.setattr(compare, "digests", slow)
    report = lake.verify()
    assert report.is_good and report.offset > first


UNSEEN = (
    "import apsw, sys; db = apsw.Connection(sys.argv[1]); db.set_busy_timeout(60_000); "
    "db.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)"
)


def past_capture(lake: Lake, statement: str) -> None:
    """Run a statement in another process with capture triggers off."""
    file = str(Path(lake.server.config.data) / "main.db")
    code = f"{UNSEEN}; db.execute(sys.argv[2]); db.close()"
    subprocess.run([sys.executable, "-c", code, file, statement], check=True)


def test_rows_changed_without_capture_are_found_by_verify(lake: Lake) -> None:
    past_capture(lake, "UPDATE t SET v = 'unseen' WHERE id = 7")
    report = lake.verify(repair=True)  # the log says nothing of it: the sink is brought to what the source has
    assert len(report.bad) == report.repaired == 1 and lake.is_equal()
    lake.server.sql("UPDATE t SET v = 'seen' WHERE id = 8")
    past_capture(lake, "UPDATE t SET v = 'unseen' WHERE id = 8")
    report = lake.verify(repair=True)  # here it says another thing than the source
    assert report.error is not None and report.error.extra["resnapshot_reason"] == "log_disagrees"
    assert not report.is_good


def test_verify_without_a_finished_snapshot_is_refused(spark: SparkSession, server: Live, tmp_path: Path) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    report = Lake(spark, server, tmp_path).verify()
    assert not report.is_good and report.error is not None and "not finished" in report.error.message


SPANS = [Span(b"", encode_key((5,))), Span(encode_key((5,)), None)]


@pytest.mark.parametrize("kind", ["f64", "u64", "dec", "uuid", "datetime", "bool", "any"])
def test_keys_ordered_differently_by_spark_are_compared_as_a_single_span(kind: str) -> None:
    assert comparable(Table("t", (Column("k", kind),), ("k",)), SPANS) == [Span.all()]


def test_integer_keys_keep_their_spans_and_text_keys_are_compared_as_a_single_span() -> None:
    assert comparable(Table("t", (Column("k", "i64"),), ("k",)), SPANS) == SPANS
    assert comparable(Table("t", (Column("k", "str"),), ("k",)), SPANS) == [Span.all()]  # a number among texts
    folded = Table("t", (Column("k", "str", collation="NOCASE"),), ("k",))
    assert comparable(folded, [Span(b"", encode_key(("a",))), Span(encode_key(("a",)), None)]) == [Span.all()]
    cut = encode_key((5,))[:-1]
    assert comparable(Table("t", (Column("k", "i64"),), ("k",)), [Span(b"", cut), Span(cut, None)]) == [Span.all()]


def test_source_is_read_in_the_column_types_that_the_sink_has() -> None:
    key, price, more = Column("id", "i64"), Column("price", "dec", "numeric(5,2)"), Column("more", "str", "text")
    held = Table("t", (key, price), ("id",), version=1)
    present = Table("t", (key, Column("price", "dec", "numeric(9,4)"), more), ("id",), version=2)
    assert as_held(held, present) == Table("t", (key, price, more), ("id",), version=2)


def test_damaged_typed_values_are_found_and_repaired(lake: Lake, server: Live) -> None:
    server.sql("CREATE TABLE d (id INTEGER PRIMARY KEY, price DECIMAL(9,2), day DATE, at DATETIME)")
    rows = ",".join(f"({n}, {n}.25, '2026-01-31', '2026-01-31 10:00:00')" for n in range(1, 50))
    server.sql(f"INSERT INTO d VALUES {rows}, (99, 'odd', '2026-02-30', NULL)")
    spec = lake.spec("d")
    lake.carry(spec)
    assert lake.verify(spec).is_good
    lake.table("d").update(updates={"price": "0.01"}, predicate="id = 7")
    lake.table("d").update(updates={"day": "DATE '2026-02-01'"}, predicate="id = 99")
    report = lake.verify(spec)
    assert sum(each.difference.different for each in report.bad if each.difference) == 2
    assert lake.verify(spec, repair=True).repaired == len(report.bad)
    assert lake.rows("d") == lake.source("d")
