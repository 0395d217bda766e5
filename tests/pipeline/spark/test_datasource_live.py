"""The data source against a real server: what Spark reads equals the database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conformance.live_server import Live
from tests.pipeline.spark.streams import Stream

from headwater.client import Client
from headwater.errors import InvalidRequest, NotFound, SchemaChanged
from headwater.pipeline.failure import cause_of
from headwater.pipeline.sinks.sink import Part
from headwater.pipeline.spark.frames import Server, changes_frame, rows_frame
from headwater.pipeline.spark.options import LogPiece

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PRE, POST = "update_preimage", "update_postimage"


@pytest.fixture
def client(server: Live) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def read(spark: SparkSession, server: Live, **options: Any) -> DataFrame:
    return spark.read.format("headwater").options(url=server.url, **{"table": "t"} | options).load()


def values(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.selectExpr(*columns).collect())


def fold(changes: list[dict[str, Any]], rows: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """Return the rows after `changes`: a preimage or delete removes its key, other images set it."""
    rows = dict(rows or {})
    for change in sorted(changes, key=lambda each: (each["_offset"], each["_change_type"] == POST)):
        if change["_change_type"] in (PRE, "delete"):
            rows.pop(change["id"], None)
        else:
            rows[change["id"]] = change["v"]
    return rows


def test_batch_reads_the_table_at_a_single_offset_during_writes(spark: SparkSession, server: Live) -> None:
    """Two rows always sum to 100, in every transaction, so every read must see that sum."""
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v INTEGER)")
    for first in range(0, 1000, 250):
        server.sql("INSERT INTO t VALUES " + ",".join(f"({n}, {50})" for n in range(first, first + 250)))
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            server.together(
                f"UPDATE t SET v = v - 1 WHERE id = {step % 500}",
                f"UPDATE t SET v = v + 1 WHERE id = {999 - step % 500}",
            )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            frame = read(spark, server, rangeBytes=2000)
            assert frame.rdd.getNumPartitions() > 1
            rows = dict(values(frame, "id", "v"))
            assert len(rows) == 1000 and all(rows[n] + rows[999 - n] == 100 for n in range(500))
    finally:
        stop.set()
        writer.join()
    assert values(read(spark, server), "id", "v") == [tuple(row) for row in server.sql("SELECT id, v FROM t")]


def test_frame_keeps_its_offset_and_an_older_version_is_readable(
    spark: SparkSession, server: Live, client: Client
) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
    server.sql("INSERT INTO t VALUES (1, 'a')")
    frame, version = read(spark, server), client.describe("main", "t").version
    server.sql("UPDATE t SET v = 'b'")
    server.sql("INSERT INTO t VALUES (2, 'c')")
    assert values(frame, "id", "v") == [(1, '"a"')]
    assert values(read(spark, server, version=version), "id", "v") == [(1, '"a"')]
    assert values(read(spark, server), "id", "v") == [(1, '"b"'), (2, '"c"')]


def test_every_kind_of_value_is_read_by_spark(spark: SparkSession, server: Live) -> None:
    server.sql(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, i INTEGER, r REAL, s TEXT, b BLOB, d DECIMAL(9, 3), j JSON,"
        " dt DATETIME, o BOOLEAN, u BIGINT UNSIGNED)"
    )
    server.sql("INSERT INTO t (id) VALUES (1)")
    text = "snö \U0001f40d ' \" \n"
    server.sql("INSERT INTO t (id, i, r, s) VALUES (2, 9223372036854775807, 1.5, ?)", text)
    server.sql("INSERT INTO t (id, b, d, j) VALUES (3, x'00ff', 1.25, '{\"a\": 1}')")
    server.sql("INSERT INTO t (id, i, r) VALUES (4, 'not a number', 'nor this')")
    rows = {row["id"]: row.asDict() for row in read(spark, server).collect()}
    assert all(value is None for name, value in rows[1].items() if name != "id")
    assert (rows[2]["i"], rows[2]["r"], rows[2]["s"]) == (2**63 - 1, 1.5, text)
    assert bytes(rows[3]["b"]) == b"\x00\xff"
    assert rows[4]["i"] is None and "not a number" in rows[4]["_misfit"]
    assert fold_free(read(spark, server, after=0)) == rows


def test_columns_are_typed_by_their_declaration_unless_text_is_asked_for(spark: SparkSession, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, price DECIMAL(9, 3), day DATE, at DATETIME)")
    server.sql("INSERT INTO t VALUES (1, 1.25, '2026-01-31', '2026-01-31 10:00:00'), (2, 0.0001, 'soon', NULL)")
    for options in ({}, {"after": 0}):
        typed, text = (read(spark, server, **options, types=form) for form in ("typed", "text"))
        assert read(spark, server, **options).schema == typed.schema
        assert dict(typed.dtypes)["price"] == "decimal(9,3)" and dict(text.dtypes)["price"] == "string"
        assert values(typed, "id", "string(price)", "string(day)", "string(at)", "_misfit") == [
            (1, "1.250", "2026-01-31", "2026-01-31 10:00:00", None),
            (2, None, None, None, '{"price":{"t":"json","v":0.0001},"day":{"t":"str","v":"soon"}}'),
        ]
        assert values(text, "id", "price", "day", "at", "_misfit") == [
            (1, "1.25", "2026-01-31", "2026-01-31 10:00:00", None),
            (2, "0.0001", None, None, '{"day":{"t":"str","v":"soon"}}'),
        ]


def test_key_stays_text_in_every_shape_of_a_typed_table(spark: SparkSession, server: Live, client: Client) -> None:
    server.sql("CREATE TABLE t (day DATE PRIMARY KEY, due DATE)")
    server.sql("INSERT INTO t VALUES ('2026-01-31', '2026-02-28')")
    old = client.describe("main", "t").table.version
    server.sql("ALTER TABLE t ADD COLUMN more TEXT")
    for options in ({}, {"after": 0}, {"after": 0, "shape": old}):
        frame = read(spark, server, **options)
        assert dict(frame.dtypes) | {"day": "string", "due": "date"} == dict(frame.dtypes)
        assert values(frame, "day", "string(due)") == [("2026-01-31", "2026-02-28")]
        assert ("more" in frame.columns) is ("shape" not in options)


def fold_free(frame: DataFrame) -> dict[int, dict[str, Any]]:
    """Return the rows of inserts by id."""
    about = ("_change_type", "_commit_version", "_commit_timestamp", "_offset", "_txn")
    return {row["id"]: row.asDict() for row in frame.drop(*about).collect()}


def test_empty_table_and_table_of_one_row_are_read(spark: SparkSession, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    assert read(spark, server).collect() == []
    assert read(spark, server, startingOffset="earliest").collect() == []
    server.sql("INSERT INTO t VALUES (1, 'a')")
    assert values(read(spark, server), "id", "v") == [(1, "a")]


def test_columns_and_where_options_select_rows_and_changes(spark: SparkSession, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v INTEGER, w TEXT)")
    server.sql("INSERT INTO t VALUES (1, 10, 'a'), (2, 20, 'b')")
    server.sql("UPDATE t SET v = 5 WHERE id = 2")
    chosen = read(spark, server, columns="w", where="v >= 10")
    assert chosen.columns == ["id", "w", "_misfit"] and values(chosen, "id", "w") == [(1, "a")]
    changes = read(spark, server, after=0, where="v = 20")
    assert values(changes, "_change_type", "v") == [("insert", 20), (PRE, 20)]
    with pytest.raises(Exception) as caught:
        read(spark, server, columns="x")
    assert isinstance(cause_of(caught.value), InvalidRequest)
    with pytest.raises(Exception) as caught:
        read(spark, server, table="tt")
    assert isinstance(cause_of(caught.value), NotFound)


def test_frame_read_again_with_another_condition_has_all_its_rows(spark: SparkSession, server: Live) -> None:
    """Spark 4.2 reads all queries of a frame by what the source made of the conditions of one of them."""
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    server.sql("INSERT INTO t VALUES (1), (2), (3), (4)")
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(spark, server)
        assert values(frame.where("id < 3"), "id") == [(1,), (2,)]
        assert values(frame, "id") == [(1,), (2,), (3,), (4,)]
        assert values(frame.where("id > 2").union(frame.where("id = 1")), "id") == [(1,), (3,), (4,)]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_table_without_a_key_is_read_with_its_rowid(spark: SparkSession, server: Live) -> None:
    server.sql("CREATE TABLE t (v TEXT)")
    server.sql("INSERT INTO t VALUES ('a'), ('a')")
    assert values(read(spark, server), "_rowid", "v") == [(1, "a"), (2, "a")]
    assert read(spark, server, columns="v").columns == ["v", "_rowid", "_misfit"]


def test_stream_of_changes_folds_to_the_table(spark: SparkSession, server: Live, tmp_path: Path) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    stream = Stream(spark, tmp_path / "checkpoint", server.url, maxRowsPerTrigger=40, rowsPerPartition=7)
    server.sql("INSERT INTO t VALUES " + ",".join(f"({n}, 'x')" for n in range(50)))
    server.sql("UPDATE t SET v = 'y' WHERE id % 3 = 0")
    assert len(stream.run()) > 2
    server.sql("UPDATE t SET id = id + 1000 WHERE id < 10")
    server.sql("DELETE FROM t WHERE id % 7 = 0")
    server.together(
        "UPDATE t SET id = -1 WHERE id = 1", "UPDATE t SET id = 1 WHERE id = 2", "UPDATE t SET id = 2 WHERE id = -1"
    )
    stream.run()
    assert fold(stream.rows) == dict(server.sql("SELECT id, v FROM t"))


def test_stream_after_a_snapshot_continues_without_gap_or_repeat(
    spark: SparkSession, server: Live, client: Client, tmp_path: Path
) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    described = client.describe("main", "t")
    rows = dict(values(read(spark, server, version=described.version), "id", "v"))
    server.sql("UPDATE t SET v = 'c' WHERE id = 1")
    stream = Stream(spark, tmp_path / "checkpoint", server.url, startingOffset=str(described.latest))
    stream.run()
    assert fold(stream.rows, rows) == {1: "c", 2: "b"}


def test_starting_timestamp_selects_the_later_changes(spark: SparkSession, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    server.sql("INSERT INTO t VALUES (1)")
    (first,) = read(spark, server, after=0).toArrow().to_pylist()
    ms = int(first["_commit_timestamp"].timestamp() * 1000)
    assert [row["id"] for row in read(spark, server, startingTimestamp=str(ms - 60_000)).collect()] == [1]
    assert read(spark, server, startingTimestamp=str(ms + 30_000)).collect() == []


@pytest.mark.parametrize("tables", ["t,u", "*"])
def test_changes_of_several_tables_are_delivered_as_json(
    spark: SparkSession, server: Live, tmp_path: Path, tables: str
) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("CREATE TABLE u (k TEXT PRIMARY KEY)")
    server.together("INSERT INTO t VALUES (1, 'a')", "INSERT INTO u VALUES ('x')")
    server.sql("UPDATE t SET v = 'b'")
    stream = Stream(spark, tmp_path / "checkpoint", server.url, tables=tables)
    del stream.options["table"]
    stream.run()
    told = sorted((row["_offset"], row["_table"]) for row in stream.rows if row["_change_type"] != "schema_change")
    assert [table for _, table in told] == ["t", "u", "t"]
    changed = next(row for row in stream.rows if row["before"] and row["after"])
    assert '"a"' in changed["before"] and '"b"' in changed["after"]


def test_schema_change_stops_a_running_stream_and_a_restart_continues(
    spark: SparkSession, server: Live, tmp_path: Path
) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("INSERT INTO t VALUES (1, 'a')")
    stream = Stream(spark, tmp_path / "checkpoint", server.url)
    query = stream.start(False)
    query.processAllAvailable()
    server.sql("INSERT INTO t VALUES (2, 'b')")
    server.sql("ALTER TABLE t ADD COLUMN w TEXT")
    server.sql("INSERT INTO t VALUES (3, 'c', 'new')")
    with pytest.raises(Exception) as caught:
        query.processAllAvailable()
    assert isinstance(cause_of(caught.value), SchemaChanged)
    assert sorted(row["id"] for row in stream.rows) == [1, 2]
    ((_, rows),) = stream.run()
    assert [(row["id"], row["w"]) for row in rows] == [(3, "new")]


def test_pinned_columns_survive_a_restart_after_a_schema_change(
    spark: SparkSession, server: Live, tmp_path: Path
) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("INSERT INTO t VALUES (1, 'a')")
    stream = Stream(spark, tmp_path / "checkpoint", server.url, schemaPolicy="pin")
    stream.run()
    server.sql("ALTER TABLE t ADD COLUMN w TEXT")
    server.sql("INSERT INTO t VALUES (3, 'c', 'new')")
    assert isinstance(stream.failure(), SchemaChanged)
    shape = stream.place()["shape"]
    ((_, rows),) = stream.run(shape=shape)
    assert [row["id"] for row in rows] == [3] and "w" not in rows[0]


def test_pipeline_frames_read_exactly_the_requested_parts(spark: SparkSession, server: Live, client: Client) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("INSERT INTO t VALUES " + ",".join(f"({n}, 'x')" for n in range(100)))
    described, place = client.describe("main", "t"), Server(server.url)
    ranges = client.ranges("main", "t", 200)
    parts = [Part(each.span, described.latest) for each in ranges]
    for table in ("t", described.table):
        rows = rows_frame(spark, place, "main", table, generation=described.generation, parts=parts)
        assert rows.rdd.getNumPartitions() == len(parts) > 1
        assert rows.count() == 100
        told = rows_frame(spark, place, "main", table, generation=described.generation, parts=parts, ends=True)
        assert told.columns == [*rows.columns, "_end"] and told.rdd.getNumPartitions() == len(parts)
        ends = told.where("_end IS NOT NULL").collect()
        assert len(ends) == len(parts) and sum(end["_end"] for end in ends) == 100
        assert all(value is None for end in ends for value in end[:-1])
        assert told.where("_end IS NULL").drop("_end").collect() == rows.collect()
    bounds = {"generation": described.generation, "after": 0, "upto": described.latest, "shape": described.table}
    assert changes_frame(spark, place, "main", "t", **bounds).count() == 100
    slices = [LogPiece(0, described.latest, each.span) for each in ranges[:1]]
    some = changes_frame(spark, place, "main", "t", **bounds, slices=slices)
    assert 0 < some.count() < 100
    assert changes_frame(spark, place, "main", "t", **bounds, slices=[]).count() == 0
    assert rows_frame(spark, place, "main", "t", generation=described.generation, parts=[]).count() == 0


def test_token_is_read_from_its_file_and_absent_from_the_query_plan(spark: SparkSession, tmp_path: Path) -> None:
    live = Live(tmp_path / "data", serve={"auth": True, "token": "s3cret-token"})
    try:
        live.sql("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        live.sql("INSERT INTO t VALUES (1)")
        (tmp_path / "token").write_text("s3cret-token\n")
        frame = read(spark, live, token_file=str(tmp_path / "token"))
        assert frame.count() == 1
        assert "s3cret" not in frame._jdf.queryExecution().toString()
        with pytest.raises(Exception) as caught:
            read(spark, live)
        assert cause_of(caught.value).code == "unauthorized"
    finally:
        live.stop()


def test_stream_keeps_the_form_of_its_checkpoint(spark: SparkSession, server: Live, tmp_path: Path) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, day DATE)")
    server.sql("INSERT INTO t VALUES (1, '2026-01-31')")
    stream = Stream(spark, tmp_path / "checkpoint", server.url)
    ((_, rows),) = stream.run(types="text")
    assert [row["day"] for row in rows] == ["2026-01-31"]
    server.sql("INSERT INTO t VALUES (2, '2026-02-28')")
    error = stream.failure()
    assert isinstance(error, SchemaChanged) and "types to text" in error.hint
    ((_, rows),) = stream.run(types="text")
    assert [row["day"] for row in rows] == ["2026-02-28"]
