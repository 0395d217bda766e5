"""Targets for the SQL, Parquet and foreach sinks, for the shared suite of sinks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from tests.pipeline import servers

from headwater.model.table import Table
from headwater.pipeline.sinks.foreach import ForeachSink
from headwater.pipeline.sinks.history import as_history
from headwater.pipeline.sinks.sink import UPSERT, Part, Sink, State, Step

Row = dict[str, Any]


# Histories and logs, whose current rows are what a replay gives


def replayed(images: Sequence[Row]) -> list[Row]:
    """Return the rows at the end of a history: snapshot rows, then changes by offset, the preimage of each first."""
    about = ("_change_type", "_commit_version", "_commit_timestamp", "_offset", "_txn", "snapshot", "commit")
    rows: dict[Any, Row] = {}
    for image in sorted(images, key=lambda image: (image["_offset"], image["_change_type"] != "update_preimage")):
        plain = {name: value for name, value in image.items() if name not in about}
        if image["_change_type"] in ("update_preimage", "delete"):
            rows.pop(image["id"], None)
        else:
            rows[image["id"]] = plain
    return list(rows.values())


def offset_type_and_key(images: Sequence[Row]) -> list[tuple[int, str, Any]]:
    """Return offset, change type and key of each image."""
    return [(image["_offset"], image["_change_type"], image["id"]) for image in images]


# SQL


class SqlTarget:
    """A table in a separate database."""

    def __init__(self, url: str, mode: str, spark: SparkSession, end: Callable[[], None] = lambda: None) -> None:
        self._url, self._mode, self._spark, self._end = url, mode, spark, end

    def sink(self) -> Sink:
        from headwater.pipeline.sinks.registry import open_sink

        settings = {"url": self._url, "table": "target", "mode": self._mode}
        return open_sink("sql", settings, name="t", spark=self._spark)

    def stored_rows(self) -> list[Row]:
        """Return the rows of the table, read without the sink; values are converted back to the kinds of the source."""
        engine = sa.create_engine(self._url)
        try:
            with engine.connect() as connection:
                found = [dict(row) for row in connection.execute(sa.text("SELECT * FROM target")).mappings()]
        finally:
            engine.dispose()
        return [_as_in_source(row) for row in found]

    def rows(self) -> list[Row]:
        return self.stored_rows() if self._mode == UPSERT else replayed(self.stored_rows())

    def images(self) -> list[tuple[int, str, Any]]:
        return offset_type_and_key(self.stored_rows())

    def close(self) -> None:
        self._end()


def _as_in_source(row: Row) -> Row:
    """Return a row as the source has it, with values from `_misfit` in their columns."""
    row = dict(row)
    row["vec"] = json.loads(row["vec"]) if row["vec"] is not None else None
    row["big"] = int(row["big"]) if row["big"] is not None else None
    row["ok"] = bool(row["ok"]) if row["ok"] is not None else None
    told = json.loads(row["_misfit"]) if row["_misfit"] else {}
    if told.get("total", {}).get("t") == "f64":
        row["total"] = float(told.pop("total")["v"])
        row["_misfit"] = json.dumps(told) if told else None
    return row


def on_sqlite(spark: SparkSession, folder: Path, mode: str) -> SqlTarget:
    return SqlTarget(f"sqlite:///{folder}/lake.db", mode, spark)


def on_server(start: Callable[[], str]) -> Callable[[SparkSession, Path, str], SqlTarget]:
    def make(spark: SparkSession, folder: Path, mode: str) -> SqlTarget:
        server = start()
        url = servers.create_database(server, f"sink_{uuid.uuid4().hex[:8]}")
        return SqlTarget(url, mode, spark, lambda: servers.drop_database(server, url))

    return make


# Parquet


class ParquetTarget:
    """A folder, read with a standard Parquet reader."""

    def __init__(self, spark: SparkSession, folder: Path, mode: str) -> None:
        self.path, self._spark = folder / "lake", spark

    def sink(self) -> Sink:
        from headwater.pipeline.sinks.registry import open_sink

        return open_sink("parquet", {"path": str(self.path)}, name="t", spark=self._spark)

    def stored_rows(self) -> list[Row]:
        files = sorted(self.path.glob("snapshot=*/*/*.parquet"))
        rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
        names = {name: None for row in rows for name in row}
        return [names | row for row in rows]

    def rows(self) -> list[Row]:
        return replayed(self.stored_rows())

    def images(self) -> list[tuple[int, str, Any]]:
        return offset_type_and_key(self.stored_rows())

    def close(self) -> None:
        pass


# Foreach


class Book:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.state: State | None = None

    def load(self) -> State | None:
        return self.state

    def save(self, state: State) -> None:
        self.state = state


class ForeachTarget:
    """A list that a foreach function fills."""

    def __init__(self, spark: SparkSession, folder: Path, mode: str) -> None:
        self._book, self._taken = Book(), list[Row]()

    def sink(self) -> Sink:
        return ForeachSink("foreach", self._book, self._take)

    def _take(self, frame: DataFrame, work: Step | list[Part], table: Table) -> None:
        told = frame if isinstance(work, Step) else as_history(frame, table, work)
        for row in told.collect():
            plain = {
                name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.asDict().items()
            }
            self._taken.append(plain)

    def rows(self) -> list[Row]:
        names = {name: None for row in self._taken for name in row}
        return replayed([names | row for row in self._taken])

    def images(self) -> list[tuple[int, str, Any]]:
        return offset_type_and_key(self._taken)

    def close(self) -> None:
        pass
