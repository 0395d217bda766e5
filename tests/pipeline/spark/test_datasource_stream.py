"""Streams: every change once, in batches, over restarts; and an error where Spark would continue silently."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pipeline.fake_pull_server import TABLE, Twin
from tests.pipeline.spark.streams import Stream

from headwater.errors import ConfigError, OffsetExpired, PipelineError, SchemaChanged
from headwater.model.table import Column

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXTRA = Column("extra", "f64")


@pytest.fixture
def stream(spark: SparkSession, twin: Twin, tmp_path: Path) -> Stream:
    twin.insert(*[(n, f"row {n}", None) for n in range(1, 11)])
    return Stream(spark, tmp_path / "checkpoint", twin.url)


def offsets(batch: tuple[int, list[dict]]) -> list[int]:
    return [row["_offset"] for row in batch[1]]


def test_existing_changes_are_delivered_in_batches_within_the_row_limit(stream: Stream) -> None:
    batches = stream.run(maxRowsPerTrigger=8, rowsPerPartition=3)
    assert [sorted(offsets(batch)) for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


def test_restarted_stream_continues_after_the_delivered_changes(stream: Stream, twin: Twin) -> None:
    stream.run()
    assert stream.run() == []
    twin.update((1, "row 1", None), (1, "new", None))
    ((_, rows),) = stream.run()
    assert [(row["_change_type"], row["name"]) for row in rows] == [
        ("update_preimage", "row 1"),
        ("update_postimage", "new"),
    ]


def test_uncommitted_batch_is_repeated_unchanged(stream: Stream, twin: Twin) -> None:
    (first,) = stream.run()
    stream.forget_commit()
    twin.insert((11, "later", None))
    again, later = stream.run()
    assert again == first and offsets(later) == [11]


def test_log_shorter_than_the_checkpoint_stops_the_query(stream: Stream) -> None:
    stream.run()
    stream.move(offset=12)
    error = stream.failure()
    assert isinstance(error, PipelineError)
    assert error.message == "the log ends at offset 10, before the query's offset 12"


def test_log_with_expired_changes_stops_the_query(stream: Stream, twin: Twin) -> None:
    stream.run()
    twin.insert((11, "a", None), (12, "b", None))
    twin.horizon = 12
    assert isinstance(stream.failure(), OffsetExpired)


def test_log_with_expired_changes_of_an_uncommitted_batch_stops_the_query(stream: Stream, twin: Twin) -> None:
    stream.run()
    twin.insert((11, "a", None))
    stream.run()
    stream.forget_commit()
    twin.horizon = 12
    assert isinstance(stream.failure(), OffsetExpired)


def test_new_log_generation_stops_the_query(stream: Stream, twin: Twin) -> None:
    stream.run()
    twin.generation = "g2"
    error = stream.failure()
    assert "began the new generation" in error.message and error.extra["resnapshot_reason"] == "log_generation_changed"


def test_stream_without_starting_offset_is_refused(stream: Stream) -> None:
    del stream.options["startingOffset"]
    error = stream.failure()
    assert isinstance(error, ConfigError) and "startingOffset" in error.hint


@pytest.mark.parametrize(("start", "first"), [("earliest", 1), ("4", 5)])
def test_stream_begins_after_its_starting_offset(stream: Stream, start: str, first: int) -> None:
    (batch,) = stream.run(startingOffset=start)
    assert offsets(batch)[0] == first


def test_stream_from_latest_delivers_only_later_changes(stream: Stream, twin: Twin) -> None:
    query = stream.start(False, startingOffset="latest")
    query.processAllAvailable()
    twin.insert((11, "later", None))
    query.processAllAvailable()
    query.stop()
    assert [row["_offset"] for row in stream.rows] == [11]


@pytest.mark.parametrize("start", ["11", "1"])
def test_stream_from_an_offset_outside_the_log_is_refused(stream: Stream, twin: Twin, start: str) -> None:
    twin.horizon = 4
    assert isinstance(stream.failure(startingOffset=start), PipelineError | OffsetExpired)


# When the shape of the table changes while a query runs


def reshaped(stream: Stream, twin: Twin, policy: str) -> Exception | None:
    """Run a query while the table changes; return the error that ended it, or None."""
    from headwater.pipeline.failure import cause_of

    query = stream.start(False, schemaPolicy=policy)
    query.processAllAvailable()
    twin.insert((11, "before", None))
    twin.reshape(*TABLE.columns, EXTRA)
    twin.insert((12, "after", None, 1.5))
    try:
        query.processAllAvailable()
        query.stop()
        return None
    except Exception as error:
        return cause_of(error)


def test_policy_evolve_stops_at_a_schema_change_and_a_restart_delivers_the_rest(stream: Stream, twin: Twin) -> None:
    error = reshaped(stream, twin, "evolve")
    assert isinstance(error, SchemaChanged) and "from offset 12 on" in error.message
    assert [row["_offset"] for row in stream.rows] == [*range(1, 12)]
    ((_, rows),) = stream.run()
    assert [(row["name"], row["extra"]) for row in rows] == [("after", 1.5)]


def test_policy_pin_keeps_its_first_columns_across_restarts(stream: Stream, twin: Twin) -> None:
    assert reshaped(stream, twin, "pin") is None
    assert stream.rows[-1]["name"] == "after" and "extra" not in stream.rows[-1]
    twin.insert((13, "more", None, 2.5))
    error = stream.failure(schemaPolicy="pin")
    assert isinstance(error, SchemaChanged) and "shape to 1" in error.hint
    ((_, rows),) = stream.run(schemaPolicy="pin", shape=1)
    assert [row["name"] for row in rows] == ["more"] and "extra" not in rows[0]


def test_policy_fail_stops_at_a_schema_change(stream: Stream, twin: Twin) -> None:
    error = reshaped(stream, twin, "fail")
    assert isinstance(error, SchemaChanged)
    assert isinstance(stream.failure(schemaPolicy="fail"), SchemaChanged)


def test_rebuilt_table_stops_a_query_with_policy_pin(stream: Stream, twin: Twin) -> None:
    query = stream.start(False, schemaPolicy="pin")
    query.processAllAvailable()
    twin.reshape(*TABLE.columns, resnapshot=True)
    with pytest.raises(Exception, match="was rebuilt at offset 11"):
        query.processAllAvailable()


def test_query_progress_reports_the_latest_offset(stream: Stream) -> None:
    query = stream.start(True, maxRowsPerTrigger=8)
    query.awaitTermination()
    assert '"offset": 10' in query.lastProgress["sources"][0]["latestOffset"].replace('":1', '": 1')


# Without Spark


@pytest.mark.slow
def test_idle_stream_polls_over_a_single_connection(twin: Twin) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from headwater.pipeline.spark.datasource import HeadwaterDataSource

    source = HeadwaterDataSource({"url": twin.url, "table": "t", "startingoffset": "earliest"})
    schema = source.schema()
    twin.connections = 0
    reader = source.streamReader(schema)
    start = reader.initialOffset()
    for _ in range(5):
        assert reader.latestOffset(start, ReadAllAvailable()) == start
    reader.stop()
    assert twin.connections == 1
    assert [asked.get("wait_ms", 0) for asked in twin.asked[-5:]] == [100] * 5
