"""Envelopes: rows and changes as frames of key and value, both JSON, plain or in Debezium's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwater import __version__
from headwater.model.table import Table
from headwater.pipeline.sinks.history import as_history
from headwater.pipeline.sinks.sink import DEBEZIUM, Part
from headwater.pipeline.transform.compaction import DELETE, PREIMAGE, ChangeColumns, change_columns, quoted
from headwater.pipeline.transform.scd2 import SNAPSHOT
from headwater.pipeline.transform.schema import identity_of, rows_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

INSERT, UPDATE = "insert", "update"
_DEBEZIUM_OPS = {SNAPSHOT: "r", INSERT: "c", UPDATE: "u", DELETE: "d"}
_JSON = {"ignoreNullFields": "false"}


class Envelope:
    """Builder of frames with `key` and `value`. Bytes columns are base64; `u64` is a number of up to 20 digits.

    An intermediate line has its op (null for a tombstone) and the row before and after, `old` and `new`.
    """

    def __init__(self, form: str, db: str, tombstones: bool = False) -> None:
        self._form, self._db, self._tombstones = form, db, tombstones

    def of_rows(self, frame: DataFrame, table: Table, parts: Sequence[Part]) -> DataFrame:
        """Return the envelopes of snapshot rows; partition i of the frame holds the rows of part i."""
        from pyspark.sql import functions as f

        about = as_history(frame, table, parts)
        image = _image(about)
        lines = about.select(f.lit(SNAPSHOT).alias("op"), f.when(f.lit(False), image).alias("old"), image.alias("new"))
        return self._written(lines, table, frame.columns, change_columns(about))

    def of_changes(self, frame: DataFrame, table: Table) -> DataFrame:
        """Return the envelopes of changes, one per update; those of one key are in one partition, by offset."""
        from pyspark.sql import functions as f

        about = change_columns(frame)
        is_old = f.col(quoted(about.change_type)).isin(PREIMAGE, DELETE)
        images = frame.select(
            f.col(quoted(about.offset)).alias("at"), is_old.alias("is_old"), _image(frame).alias("image")
        )
        paired = images.groupBy("at").agg(
            f.first(f.when(f.col("is_old"), f.col("image")), ignorenulls=True).alias("old"),
            f.first(f.when(~f.col("is_old"), f.col("image")), ignorenulls=True).alias("new"),
        )
        placed = paired.select("at", f.posexplode(self._lines(table)).alias("place", "line"))
        lines = placed.select("at", "place", "line.op", "line.old", "line.new")
        made = self._written(lines, table, frame.columns[:-5], about, "at", "place")
        return made.repartition("key").sortWithinPartitions("at", "place").select("key", "value")

    def _lines(self, table: Table) -> Column:
        """Return the lines of one change: one, or two if it moves a row to another key, and tombstones if enabled."""
        from pyspark.sql import functions as f

        old, new = f.col("old"), f.col("new")
        nothing = f.when(f.lit(False), old)

        def line(op: Column, before: Column, after: Column) -> Column:
            return f.struct(op.alias("op"), before.alias("old"), after.alias("new"))

        gone = [line(f.lit(DELETE), old, nothing)]
        gone += [line(f.lit(None).cast("string"), old, nothing)] if self._tombstones else []
        come = [line(f.lit(INSERT), nothing, new)]
        same = f.lit(True)
        for name in identity_of(table):
            same = same & old[name].eqNullSafe(new[name])
        return (
            f.when(old.isNull(), f.array(*come))
            .when(new.isNull(), f.array(*gone))
            .when(same, f.array(line(f.lit(UPDATE), old, new)))
            .otherwise(f.array(*gone, *come))
        )

    def _written(
        self, lines: DataFrame, table: Table, columns: Sequence[str], about: ChangeColumns, *kept: str
    ) -> DataFrame:
        from pyspark.sql import functions as f

        misfit = rows_schema(table).names[-1]
        row = f.coalesce(f.col("new"), f.col("old"))
        shown = [name for name in columns if name != misfit]
        key = f.to_json(f.struct(*(row[name].alias(name) for name in identity_of(table))), _JSON)
        write = self._debezium if self._form == DEBEZIUM else self._plain
        value = f.to_json(f.struct(*write(table, shown, row, about), row[misfit].alias("misfit")), _JSON)
        return lines.select(*kept, key.alias("key"), f.when(f.col("op").isNotNull(), value).alias("value"))

    def _plain(self, table: Table, shown: Sequence[str], row: Column, about: ChangeColumns) -> list[Column]:
        from pyspark.sql import functions as f

        return [
            f.col("op"),
            f.lit(table.name).alias("table"),
            row[about.offset].alias("offset"),
            row[about.txn].alias("txn"),
            f.unix_millis(row[about.commit_timestamp]).alias("ts_ms"),
            _shown("old", shown).alias("before"),
            _shown("new", shown).alias("after"),
        ]

    def _debezium(self, table: Table, shown: Sequence[str], row: Column, about: ChangeColumns) -> list[Column]:
        from pyspark.sql import functions as f

        ts, offset, txn = f.unix_millis(row[about.commit_timestamp]), row[about.offset], row[about.txn]
        source = f.struct(
            f.lit(__version__).alias("version"),
            f.lit("headwater").alias("connector"),
            f.lit(self._db).alias("name"),
            ts.alias("ts_ms"),
            f.when(f.col("op") == SNAPSHOT, "true").otherwise("false").alias("snapshot"),
            f.lit(self._db).alias("db"),
            f.concat(f.lit('[null,"'), offset.cast("string"), f.lit('"]')).alias("sequence"),
            f.lit(table.name).alias("table"),
            txn.alias("txId"),
            offset.alias("lsn"),
        )
        codes = f.create_map(*(f.lit(word) for pair in _DEBEZIUM_OPS.items() for word in pair))
        return [
            _shown("old", shown).alias("before"),
            _shown("new", shown).alias("after"),
            source.alias("source"),
            codes[f.col("op")].alias("op"),
            ts.alias("ts_ms"),
            f.when(txn.isNotNull(), f.struct(txn.alias("id"))).alias("transaction"),
        ]


def _image(frame: DataFrame) -> Column:
    """Return a whole row as one struct."""
    from pyspark.sql import functions as f

    return f.struct(*(f.col(quoted(name)) for name in frame.columns))


def _shown(side: str, names: Sequence[str]) -> Column:
    """Return the table's columns from one side of a change; null if that side is missing."""
    from pyspark.sql import functions as f

    image = f.col(side)
    return f.when(image.isNotNull(), f.struct(*(image[name].alias(name) for name in names)))
