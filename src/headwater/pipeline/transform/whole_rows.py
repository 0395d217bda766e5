"""Whole rows: an unchanged TOAST value, which the source does not send, is never written as null.

PostgreSQL leaves large values out of an update that does not change them, unless the table has REPLICA IDENTITY FULL.
A sink that can leave a column unchanged does so: the value is in an earlier change of the step or in the sink itself.
Only if the row moved to another key the value is not found, and then the pipeline takes a new snapshot.

For any other sink, a table that may leave values out is rejected before anything is read; if values were left out
undetected, the step fails and the pipeline takes a new snapshot.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from headwater.client import Described
from headwater.errors import PipelineError, SourceUnfit
from headwater.model import arrow
from headwater.model.table import Table
from headwater.pipeline.failure import note
from headwater.pipeline.transform.compaction import DELETE, PREIMAGE, change_columns, image_order, quoted
from headwater.pipeline.transform.schema import identity_of
from headwater.pipeline.transform.unchanged_columns import UNKNOWN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

READ_AGAIN = "read_again"  # detail of an error: the read may succeed at a newer offset
REASON = "values_unavailable"
_LARGE = ("str", "json", "bytes")  # values of these kinds are in `_misfit` only as unchanged TOAST


def check_whole(seen: Described) -> None:
    """Raise SourceUnfit if the source may leave values out."""
    if seen.remedy:
        raise SourceUnfit(
            f"changes of {seen.table.name!r} do not contain whole rows: updates omit large values that did not change",
            hint=f"Run: {seen.remedy}",
        )


def refuse_unknown(frame: DataFrame) -> DataFrame:
    """Return the frame of changes; its job fails at a row that lacks a value, unless the row is an old image."""
    from pyspark.sql import functions as f

    about, misfit = change_columns(frame), frame.columns[-6]
    said = f.raise_error(f.lit(note(unknown()).__notes__[-1] + "\n"))
    is_unknown = f.col(quoted(misfit)).contains(UNKNOWN) & ~f.col(quoted(about.change_type)).isin(PREIMAGE, DELETE)
    checked = f.when(is_unknown, said).otherwise(f.col(quoted(misfit))).alias(misfit)
    return frame.select(*(checked if name == misfit else f.col(quoted(name)) for name in frame.columns))


def unknown() -> PipelineError:
    """Return the error for a value that is needed and unknown."""
    return PipelineError("a value that the source did not send is needed", resnapshot_reason=REASON)


def fill_unknown(frame: DataFrame, table: Table) -> DataFrame:
    """Return a frame of changes of `table` for a sink that can leave columns unchanged.

    A value that the source left out is filled from the last change of its key in the frame that has the value; if no
    change has it, its mark stays in `_misfit`. Only images of an update in place are filled or keep it: a row that
    moved from another key shares nothing with the row that had its key, and fails the job like `refuse_unknown`.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    about, misfit = change_columns(frame), frame.columns[-6]
    names = [arrow.column_name(table, column) for column in table.columns if column.kind in _LARGE]
    large = [name for name in names if name in frame.columns[:-6] and name not in identity_of(table)]
    kind, offset, said = (f.col(quoted(name)) for name in (about.change_type, about.offset, misfit))
    is_image = ~kind.isin(PREIMAGE, DELETE)
    images = Window.partitionBy(*map(quoted, identity_of(table))).orderBy(image_order(about))
    is_after_its_own = (f.lag(offset).over(images) == offset) & (f.lag(kind).over(images) == PREIMAGE)
    in_place = f.coalesce(is_after_its_own, f.lit(False))
    columns, rest = {}, said
    for name in large:
        column, is_unknown = f.col(quoted(name)), _tells(said, name)
        known = f.last(f.when(is_image & ~is_unknown, f.struct(column.alias("value"))), ignorenulls=True).over(images)
        is_filled = is_image & in_place & is_unknown & known.isNotNull()
        columns[name] = f.when(is_filled, known["value"]).otherwise(column).alias(name)
        rest = f.when(is_filled, _without(rest, name)).otherwise(rest)
    others = reduce(_without, large, said)
    is_lost = is_image & (others.contains(UNKNOWN) | (rest.contains(UNKNOWN) & ~in_place))
    error = f.raise_error(f.lit(note(unknown()).__notes__[-1] + "\n"))
    columns[misfit] = f.when(is_lost, error).otherwise(f.nullif(rest, f.lit("{}"))).alias(misfit)
    return frame.select(*(columns.get(name, f.col(quoted(name))) for name in frame.columns))


def _entry(name: str) -> str:
    """Return the text that marks `name` as unknown in `_misfit`; after a brace or comma it is never part of a value."""
    return f"{msgspec.json.encode(name).decode()}:{UNKNOWN}"


def _tells(misfit: Column, name: str) -> Column:
    from pyspark.sql import functions as f

    found = misfit.contains("{" + _entry(name)) | misfit.contains("," + _entry(name))
    return f.coalesce(found, f.lit(False))


def _without(misfit: Column, name: str) -> Column:
    from pyspark.sql import functions as f

    for old, new in (("{" + _entry(name) + ",", "{"), ("," + _entry(name), ""), ("{" + _entry(name) + "}", "{}")):
        misfit = f.replace(misfit, f.lit(old), f.lit(new))
    return misfit
