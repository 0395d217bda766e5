"""Compaction: the last change per key of all changes of a step, and whether it removes the key.

A preimage removes its key, a postimage or an insert sets it, and within one change the preimage is first: this
order gives the right rows for a changed key and for two swapped keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headwater.errors import SinkUnfit
from headwater.pipeline.failure import note

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DELETED = "_deleted"
PREIMAGE, DELETE = "update_preimage", "delete"


class ChangeColumns(NamedTuple):
    """The names of the columns that describe a change; they get another name if the table has such a column itself."""

    change_type: str
    commit_version: str
    commit_timestamp: str
    offset: str
    txn: str


def change_columns(frame: DataFrame) -> ChangeColumns:
    """Return the names of the columns that describe a change: always the last five of the frame."""
    return ChangeColumns(*frame.columns[-5:])


def unused_name(name: str, taken: Sequence[str]) -> str:
    """Return `name` with as many leading underscores as it needs to differ from `taken`."""
    used = {each.lower() for each in taken}
    while name.lower() in used:
        name = "_" + name
    return name


def quoted(name: str) -> str:
    """Return `name` quoted for the SQL of Spark and of delta-rs."""
    return "`" + name.replace("`", "``") + "`"


def last_per_key(frame: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return the last row per key of a frame of changes; the last column, `_deleted`, marks a deleted key.

    One shuffle, none if the frame has one partition. A key with a null fails the job with SinkUnfit, which
    pipeline/failure.py restores in the driver.
    """
    from pyspark.sql import functions as f

    about = change_columns(frame)
    row = unused_name("_row", frame.columns)
    whole = f.struct(*[f.col(quoted(name)) for name in frame.columns])
    last = frame.groupBy(*map(quoted, identity)).agg(f.max_by(whole, image_order(about)).alias(row))
    columns = [f.col(row)[name].alias(name) for name in frame.columns]
    gone = f.col(row)[about.change_type].isin(PREIMAGE, DELETE)
    return refuse_nulls(last.select(*columns, gone.alias(unused_name(DELETED, frame.columns))), identity)


def image_order(about: ChangeColumns) -> Column:
    """Return a column that sorts the images of one key: by offset, the preimage of a change before its postimage."""
    from pyspark.sql import functions as f

    return f.struct(f.col(quoted(about.offset)), f.col(quoted(about.change_type)) != PREIMAGE)


def refuse_nulls(frame: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return `frame`; its job fails with SinkUnfit at a row with a null in a column of `identity`."""
    from pyspark.sql import functions as f

    def checked(name: str) -> Column:
        column = f.col(quoted(name))
        # The line break separates the note from the text that Spark appends.
        said = f.raise_error(f.lit(note(no_key(name)).__notes__[-1] + "\n"))
        return f.when(column.isNull(), said).otherwise(column).alias(name) if name in identity else column

    return frame.select(*map(checked, frame.columns))


def no_key(column: str) -> SinkUnfit:
    """Return the error for a row whose key is unknown."""
    return SinkUnfit(
        f"key column {column!r} holds a null, or a value that does not fit its type: the row has no key here",
        hint="Give the table a NOT NULL primary key of one type.",
    )
