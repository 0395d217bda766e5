"""One table and its steps, for the tests of the SQL sink: rows of two spans, then some steps of changes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from tests.pipeline.sinks.local_frames import LocalFrame, compacted

from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.pipeline.sinks.sink import UPSERT, Part, Plan, Step
from headwater.pipeline.sinks.sql import sql
from headwater.pipeline.transform.schema import changes_schema, rows_schema

TABLE = Table("t", (Column("id", "i64"), Column("name", "str")), ("id",))
MIDDLE = encode_key((10,))
SPANS = (Span(b"", MIDDLE), Span(MIDDLE, None))
Rows = dict[int, str]


def plan(id: str = "p1", table: Table = TABLE) -> Plan:
    return Plan(id, "g", 100, SPANS, table)


def rows_frame(*parts: Rows) -> LocalFrame:
    """Return a frame of rows, one partition for each of `parts`."""
    made = [[{"id": key, "name": name} for key, name in part.items()] for part in parts]
    return LocalFrame([pa.Table.from_pylist(rows, rows_schema(TABLE)) for rows in made])


def change(kind: str, key: int, name: str, offset: int) -> dict[str, Any]:
    about = {"_commit_version": offset, "_commit_timestamp": datetime(2026, 1, 1, tzinfo=UTC), "_txn": "x"}
    return {"id": key, "name": name, "_change_type": kind, "_offset": offset, **about}


def changes_frame(changes: Iterable[dict[str, Any]]) -> LocalFrame:
    return LocalFrame([pa.Table.from_pylist(list(changes), changes_schema(TABLE))])


def update(before: tuple[int, str], after: tuple[int, str], offset: int) -> list[dict[str, Any]]:
    return [change("update_preimage", *before, offset), change("update_postimage", *after, offset)]


class LocalSink(sql.SqlSink):
    """The SQL sink with frames that need no Spark."""

    def _compacted(self, frame: Any, table: Table) -> Any:
        return compacted(frame, table.key) if self.mode == UPSERT else frame


class Story:
    """A pipeline in steps: each method is one step of a driver."""

    FIRST, SECOND = {1: "one", 2: "two"}, {10: "ten", 11: "eleven"}
    LOADED = FIRST | SECOND
    AFTER = {1: "two", 2: "one", 11: "ELEVEN", 12: "twelve"}

    def __init__(self, url: str) -> None:
        self.sink = LocalSink(url, "target")
        self.url = url

    def begin(self) -> None:
        self.sink.begin(plan())

    def load(self) -> None:
        self.sink.load(rows_frame(self.FIRST, self.SECOND), plan(), [Part(SPANS[0], 101), Part(SPANS[1], 102)])

    def apply(self) -> None:
        """Swap the keys 1 and 2, delete 10, change 11, insert 12, and insert and delete another."""
        changes = [
            *update((1, "one"), (-1, "one"), 103),
            *update((2, "two"), (1, "two"), 104),
            *update((-1, "one"), (2, "one"), 105),
            change("delete", 10, "ten", 106),
            *update((11, "eleven"), (11, "ELEVEN"), 107),
            change("insert", 12, "twelve", 108),
            change("insert", 13, "thirteen", 109),
            change("delete", 13, "thirteen", 110),
        ]
        self.sink.apply(changes_frame(changes), Step("p1", "g", 100, 110), TABLE)

    def stored_rows(self) -> Rows:
        """Return the rows of the target, read without the sink."""
        engine = sa.create_engine(self.url)
        try:
            with engine.connect() as connection:
                return {row.id: row.name for row in connection.execute(sa.text("SELECT id, name FROM target"))}
        finally:
            engine.dispose()
