"""Whole rows: a value that the source did not tell is never written as null.

PostgreSQL leaves large values out of an update that does not change them, unless the table has REPLICA IDENTITY FULL.
A table that may do so is refused before anything is read; should it have done so while nobody looked, the step fails
and the table is read anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.client import Described
from headwater.errors import PipelineError, SourceUnfit
from headwater.pipeline.compaction import DELETE, PREIMAGE, about, quoted
from headwater.pipeline.failure import note

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

UNKNOWN = '{"t":"unavailable"}'  # as `_misfit` has it; in a text its quotes would be escaped
READ_AGAIN = "read_again"  # beside an error of a read that may go well at a newer offset
REASON = "values_unavailable"


def check_whole(seen: Described) -> None:
    """SourceUnfit where the source may leave values out."""
    if seen.remedy:
        raise SourceUnfit(
            f"the database does not tell whole rows of {seen.table.name!r}: a large value that an update leaves as it "
            "was would be missing",
            hint=f"Run: {seen.remedy}",
        )


def refuse_unknown(frame: DataFrame) -> DataFrame:
    """A frame of changes, whose job fails at a row with a value that is not known, other than an old one."""
    from pyspark.sql import functions as f

    told, misfit = about(frame), frame.columns[-6]
    error = PipelineError("a value that the source left out is needed", resnapshot_reason=REASON)
    said = f.raise_error(f.lit(note(error).__notes__[-1] + "\n"))
    is_unknown = f.col(quoted(misfit)).contains(UNKNOWN) & ~f.col(quoted(told.change_type)).isin(PREIMAGE, DELETE)
    checked = f.when(is_unknown, said).otherwise(f.col(quoted(misfit))).alias(misfit)
    return frame.select(*(checked if name == misfit else f.col(quoted(name)) for name in frame.columns))
