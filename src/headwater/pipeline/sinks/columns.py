"""Columns of sinks: on their way into tasks, and those that come again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def numbered(frame: DataFrame) -> DataFrame:
    """`frame` with numbers for names: mapInArrow does not find columns with a dot or a backtick in theirs."""
    return frame.toDF(*map(str, range(len(frame.columns))))


def came_again(name: str) -> PipelineError:
    """What is said of a new column whose name the sink still has values under: a sink keeps what was dropped."""
    return PipelineError(
        f"column {name!r} was dropped and is a new one now, and the sink has values of the old one",
        resnapshot_reason="schema_changed",
    )
