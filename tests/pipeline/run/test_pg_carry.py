"""Pipelines from a real PostgreSQL into every sink: rows, changes, new columns, TRUNCATE, all kinds, odd names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from tests.pipeline.kafka_broker import ROOT, lines_of, no_broker, start_broker
from tests.pipeline.lakes import Lake, Row
from tests.pipeline.pg_all_types_table import CHANGES, EMPTIED, FILL, KINDS, NAME, SHAPES, PgLive
from tests.pipeline.table_model import canon

from headwater.pipeline.run.spec import PipelineSpec, SinkSpec, TableSpec
from headwater.pipeline.runner import run
from headwater.pipeline.spark.jars import FOLDER, KAFKA, have_jars
from headwater.pipeline.transform.schema import TEXT
from headwater.pipeline.verify.verify import verify

pytest_plugins = ("tests.pipeline.servers",)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PHASES = [(FILL,), CHANGES, SHAPES, EMPTIED]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[PgLive]:
    made = PgLive(tmp_path, *filter(str.strip, KINDS.split(";\n")))
    yield made
    made.close()


@pytest.fixture
def lake(spark: SparkSession, source: PgLive, tmp_path: Path) -> Lake:
    return Lake(spark, source.live, tmp_path)


def carried(lake: Lake, sink: SinkSpec, guarantee: str = "exactly-once") -> PipelineSpec:
    """Carry the story's table into `sink`."""
    meta = str(lake.folder / "headwater-pipeline.db")
    tables = (TableSpec(NAME, sink),)
    return PipelineSpec(
        tables, name="pg", server=lake.server.url, meta=meta, guarantee=guarantee, range_bytes=2_000, parallelism=2
    )


def run_phases(lake: Lake, source: PgLive, spec: PipelineSpec, check: Callable[[], None]) -> None:
    """Run the statements of each phase and then the pipeline; `check` compares the sink."""
    for statements in PHASES:
        source.run(*statements)
        (done,) = run(spec, once=True, spark=lake.spark).tables
        assert done.error is None, done.error
        check()


def test_delta_table_follows_postgresql(lake: Lake, source: PgLive) -> None:
    spec = carried(lake, SinkSpec("delta", {"path": str(lake.folder / "lake" / "t")}))

    def check() -> None:
        held = [{name: value for name, value in row.items() if name != "span"} for row in lake.rows()]
        told = [{name: value for name, value in row.items() if name != "span"} for row in lake.source(NAME)]
        assert canon(held) == canon(told)

    run_phases(lake, source, spec, check)
    (report,) = verify(spec, spark=lake.spark)
    assert report.is_good and report.rows == 2


EVERY_CI_RUN = pytest.mark.soak(seconds=20, every_time=True)


@pytest.mark.parametrize(
    "engine",
    [
        "postgres_database",
        pytest.param("sqlite", marks=EVERY_CI_RUN),
        pytest.param("mariadb_database", marks=EVERY_CI_RUN),
    ],
)
def test_sql_table_follows_postgresql(lake: Lake, source: PgLive, engine: str, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{lake.folder}/sink.db" if engine == "sqlite" else str(request.getfixturevalue(engine))
    spec = carried(lake, SinkSpec("sql", {"url": url, "table": "copy of t"}))

    def check() -> None:
        (report,) = verify(spec, spark=lake.spark)
        assert report.is_good, report

    run_phases(lake, source, spec, check)


def test_parquet_history_replays_to_the_rows_of_postgresql(lake: Lake, source: PgLive) -> None:
    path = lake.folder / "lake"
    spec = carried(lake, SinkSpec("parquet", {"path": str(path)}))

    def check() -> None:
        newest = max(path.glob("snapshot=*"), key=lambda folder: folder.stat().st_mtime_ns)
        images = [row for file in newest.glob("*/*.parquet") for row in pq.ParquetFile(file).read().to_pylist()]
        now = lake.source(NAME)
        assert replayed(images, now) == canon(now)

    run_phases(lake, source, spec, check)


taken: list[Row] = []


def take(frame: Any, work: Any, table: Any) -> None:
    """A foreach function; rows without a change type begin a new snapshot."""
    rows = [row.asDict() for row in frame.collect()]
    if isinstance(work, list):
        rows = [row | {"_change_type": "snapshot", "_offset": 0} for row in rows]
    taken.extend(rows)


def test_foreach_function_receives_every_image_from_postgresql(lake: Lake, source: PgLive) -> None:
    taken.clear()
    spec = carried(lake, SinkSpec("foreach", {"function": f"{__name__}:take"}), "at-least-once")
    for statements in PHASES[:2]:
        source.run(*statements)
        (done,) = run(spec, once=True, spark=lake.spark).tables
        assert done.error is None, done.error
    now = lake.source(NAME, TEXT)
    assert replayed([{name: as_bytes(value) for name, value in row.items()} for row in taken], now) == canon(now)


@EVERY_CI_RUN
def test_kafka_topic_holds_every_change_of_postgresql_under_its_key(lake: Lake, source: PgLive) -> None:
    if not have_jars(KAFKA, ROOT / FOLDER):
        pytest.skip("no Kafka jars for Spark here; `make jars` fetches them")
    if reason := no_broker():
        pytest.skip(reason)
    broker, topic = start_broker(), f"from-postgresql-{source.name}"
    spec = carried(lake, SinkSpec("kafka", {"servers": broker, "topic": topic}), "at-least-once")
    for statements in PHASES[:2]:
        source.run(*statements)
        (done,) = run(spec, once=True, spark=lake.spark).tables
        assert done.error is None, done.error
    rows: dict[Any, Row] = {}
    for _, key, value in lines_of(broker, topic):
        found = key["Key`2"], key["part one"]
        if value["op"] == "delete":
            rows.pop(found)
        else:
            rows[found] = value["after"]
    plain = ("Key`2", "part one", "n", "at", "u", "j", "a", "words", "m", "ok", "range", 'sel"ect')  # texts in JSON too
    told = {(row["Key`2"], row["part one"]): row for row in lake.source(NAME, TEXT)}
    assert {key: [row[name] for name in plain] for key, row in rows.items()} == {
        key: [row[name] for name in plain] for key, row in told.items()
    }


def as_bytes(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


def replayed(images: list[Row], now: list[Row]) -> list[Any]:
    """Return the rows at the end of a history in the current columns; the history keeps dropped ones."""
    rows: dict[Any, Row] = {}
    for image in sorted(images, key=lambda image: (image["_offset"], image["_change_type"] != "update_preimage")):
        key = image["Key`2"], image["part one"]
        if image["_change_type"] in ("update_preimage", "delete"):
            rows.pop(key)
        else:
            rows[key] = {name: image.get(name) for name in now[0]}
    return canon(list(rows.values()))
