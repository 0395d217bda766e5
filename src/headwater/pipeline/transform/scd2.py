"""SCD2: the row versions that the changes of a step open, and the versions that they close.

Every image of a key closes the current version of the key, at the commit time of its change; an insert or a
postimage also opens a version. A version is identified by its key and the offset that opened it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headwater.pipeline.transform.compaction import (
    DELETE,
    PREIMAGE,
    ChangeColumns,
    change_columns,
    image_order,
    quoted,
    refuse_nulls,
    unused_name,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SNAPSHOT = "snapshot"  # the change type of rows that existed when the history began
OPEN, CLOSE = "open", "close"


class Versioned(NamedTuple):
    """The names of the columns that a history has in addition to those of rows."""

    change_type: str
    commit_version: str
    offset: str
    txn: str
    valid_from: str
    valid_to: str
    is_current: str


def versioned(about: ChangeColumns, names: Sequence[str]) -> Versioned:
    """Return the column names of a history with the row columns `names` and the change columns `about`."""
    own = [unused_name(name, [*names, *about]) for name in ("_valid_from", "_valid_to", "_is_current")]
    return Versioned(about.change_type, about.commit_version, about.offset, about.txn, *own)


def versions(frame: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return the row columns of a frame of changes, the columns of `Versioned`, and an action (the last column).

    open: the row is a version, which a later image of this step may close. close: the version of this key that was
    opened before `_offset` ends at `_valid_to`; there is one such row per key. One shuffle.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    about = change_columns(frame)
    names = frame.columns[:-5]
    held = versioned(about, names)
    what = unused_name("_action", [*names, *held])
    images = Window.partitionBy(*map(quoted, identity)).orderBy(image_order(about))
    time = f.col(quoted(about.commit_timestamp))
    opens = ~f.col(quoted(about.change_type)).isin(PREIMAGE, DELETE)
    first, last = f.row_number().over(images) == 1, f.lead(quoted(about.offset)).over(images).isNull()
    actions = f.array_compact(f.array(f.when(first, CLOSE), f.when(opens, OPEN)))
    chain = {held.valid_to: f.lead(time).over(images), held.is_current: last, what: actions}
    chained = refuse_nulls(frame, identity).withColumns(chain).withColumn(what, f.explode(quoted(what)))
    is_open = f.col(quoted(what)) == OPEN
    return chained.select(
        *[f.col(quoted(name)) for name in (*names, *held[:4])],
        time.alias(held.valid_from),
        f.when(is_open, f.col(quoted(held.valid_to))).otherwise(time).alias(held.valid_to),
        (is_open & f.col(quoted(held.is_current))).alias(held.is_current),
        f.col(quoted(what)),
    )
