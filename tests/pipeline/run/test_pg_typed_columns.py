"""Decimals, dates and timestamps of PostgreSQL in a lake: of their own types, equal to the source, in every sink."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute
import pytest
from tests.pipeline.lakes import Lake
from tests.pipeline.pg_all_types_table import PgLive

from headwater.pipeline.run.spec import PipelineSpec, SinkSpec, TableSpec
from headwater.pipeline.runner import run
from headwater.pipeline.spark.jars import DELTA, FOLDER, have_jars
from headwater.pipeline.verify.verify import verify

pytest_plugins = ("tests.pipeline.servers",)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[3]
TABLE = """
CREATE TABLE t (id int, due date, price numeric(10,2), long numeric(38,10), free numeric, day date, at timestamptz,
  local timestamp(3), clock time, ok boolean, data bytea, doc jsonb, list int[], PRIMARY KEY (id, due))
"""
ROWS = (
    "INSERT INTO t VALUES (1, '2026-01-31', -12345678.90, 1234567890123456789012345678.0123456789, 1.50, '2026-01-31',"
    " '2026-01-31 01:02:03.456789+05', '2026-01-31 01:02:03.456', '01:02', true, '\\x00ff', '{\"a\": 1}', '{1,NULL}'),"
    " (2, '2026-02-02', 0, 0, 0, '0001-01-01', '0001-01-01 00:00:00+00', '0001-01-01 00:00:00', '24:00', false, '',"
    " 'null', '{}')",
    "INSERT INTO t VALUES (3, '2026-03-03')",
)
CHANGES = (
    "INSERT INTO t VALUES (4, '9999-12-31', 'NaN', 'NaN', 'NaN', 'infinity', '-infinity', 'infinity')",
    "INSERT INTO t VALUES (5, '0001-01-01', 0, 0, 0, '0044-03-15 BC', '0044-03-15 BC', '10000-01-01')",
    "UPDATE t SET day = '9999-12-31', at = '9999-12-31 23:59:59.999999+00', local = '9999-12-31' WHERE id = 2",
    "UPDATE t SET price = 99999999.99, local = '1500-01-01' WHERE id = 3",
    "ALTER TABLE t ADD COLUMN later timestamp",
    "UPDATE t SET later = '2026-01-31 10:00' WHERE id = 1",
)
FIRST = {
    "id": 1,
    "due": "2026-01-31",  # part of the key
    "price": Decimal("-12345678.90"),
    "long": Decimal("1234567890123456789012345678.0123456789"),
    "free": "1.50",
    "day": date(2026, 1, 31),
    "at": datetime(2026, 1, 30, 20, 2, 3, 456789, UTC),
    "local": datetime(2026, 1, 31, 1, 2, 3, 456000),
    "clock": "01:02:00",
    "ok": True,
    "data": b"\x00\xff",
    "doc": '{"a": 1}',
    "list": "{1,NULL}",
    "_misfit": None,
    "later": datetime(2026, 1, 31, 10),
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[PgLive]:
    made = PgLive(tmp_path, TABLE, "ALTER TABLE t REPLICA IDENTITY FULL", *ROWS)
    yield made
    made.close()


@pytest.fixture
def lake(spark: SparkSession, source: PgLive, tmp_path: Path) -> Lake:
    return Lake(spark, source.live, tmp_path)


def carried(lake: Lake, sink: SinkSpec) -> PipelineSpec:
    """Run the pipeline of the table into `sink` until it has caught up, and verify it; return its spec."""
    meta = str(lake.folder / "headwater-pipeline.db")
    spec = PipelineSpec((TableSpec("t", sink),), name="typed", server=lake.server.url, meta=meta)
    (done,) = run(spec, once=True, spark=lake.spark).tables
    assert done.error is None, done.error
    (report,) = verify(spec, spark=lake.spark)
    assert report.is_good, report
    return spec


@pytest.mark.parametrize("kind", ["delta", "delta-spark"])
def test_every_type_of_postgresql_arrives_typed_in_delta(kind: str, lake: Lake, source: PgLive) -> None:
    if kind == "delta-spark" and not have_jars(DELTA, ROOT / FOLDER):
        pytest.skip("no Delta jars for Spark here; `make jars` fetches them")
    sink = SinkSpec(kind, {"path": str(lake.folder / "lake" / "t")})
    carried(lake, sink)
    source.run(*CHANGES)
    carried(lake, sink)
    rows = {row["id"]: row for row in lake.rows()}
    assert rows[1] == FIRST
    last = rows[2]
    assert (last["day"], last["local"]) == (date(9999, 12, 31), datetime(9999, 12, 31))
    assert last["at"] == datetime.max.replace(tzinfo=UTC)
    assert (rows[3]["price"], rows[3]["local"]) == (Decimal("99999999.99"), datetime(1500, 1, 1))
    unfit = ("price", "long", "day", "at", "local")
    assert [rows[4][name] for name in unfit] == [None] * 5 and rows[4]["free"] == "NaN"
    assert rows[4]["_misfit"].startswith('{"price":{"t":"dec","v":"NaN"},"long":{"t":"dec","v":"NaN"},"day":{"t":"str"')
    assert rows[5]["day"] is None and '"0044-03-15 BC"' in rows[5]["_misfit"]
    longest = pa.scalar(FIRST["long"], pa.decimal128(38, 10))
    assert lake.table().to_pyarrow_dataset().count_rows(filter=pa.compute.field("long") == longest) == 1
    if kind == "delta-spark":  # Spark reads what delta-rs wrote, and the other way round
        read = lake.spark.read.format("delta").load(sink.settings["path"])
        types = dict(read.dtypes)
        assert (types["price"], types["day"], types["at"], types["local"]) == (
            "decimal(10,2)",
            "date",
            "timestamp",
            "timestamp_ntz",
        )
        texts = read.selectExpr("id", "string(day)", "string(at)", "string(local)").orderBy("id").collect()
        assert [tuple(row) for row in texts[:2]] == [
            (1, "2026-01-31", "2026-01-30 20:02:03.456789", "2026-01-31 01:02:03.456"),
            (2, "9999-12-31", "9999-12-31 23:59:59.999999", "9999-12-31 00:00:00"),
        ]
        assert read.where(f"long = {FIRST['long']}BD").count() == 1
        assert carried(lake, SinkSpec("delta", sink.settings))  # the same table by the other engine


@pytest.mark.parametrize(
    "engine", ["sqlite", "postgres_database", pytest.param("mariadb_database", marks=pytest.mark.soak(seconds=10))]
)
def test_every_type_of_postgresql_arrives_typed_in_sql(
    engine: str, lake: Lake, source: PgLive, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{lake.folder}/sink.db" if engine == "sqlite" else str(request.getfixturevalue(engine))
    sink = SinkSpec("sql", {"url": url, "table": "copy"})
    carried(lake, sink)
    source.run(*CHANGES)
    carried(lake, sink)
    if engine == "sqlite":
        held: Any = sqlite3.connect(lake.folder / "sink.db")
        sums = held.execute("SELECT sum(price) - 99999999.99, max(day), max(local) FROM copy").fetchone()
        held.close()
        assert sums == (pytest.approx(-12345678.9), "9999-12-31", "9999-12-31 00:00:00.000000")
