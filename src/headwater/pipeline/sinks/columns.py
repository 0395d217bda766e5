"""Column names of frames for tasks, and the error for a re-created column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def numbered(frame: DataFrame) -> DataFrame:
    """Return `frame` with numbers as column names: mapInArrow cannot find a name with a dot or a backtick."""
    return frame.toDF(*map(str, range(len(frame.columns))))


def column_reappeared(name: str) -> PipelineError:
    """Return the error for a new column whose name has old values in the sink, which keeps dropped columns."""
    return PipelineError(
        f"column {name!r} was dropped and added again, and the sink still has values of the dropped column",
        resnapshot_reason="schema_changed",
    )
