"""Columns on their way into tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def numbered(frame: DataFrame) -> DataFrame:
    """`frame` with numbers for names: mapInArrow does not find columns with a dot or a backtick in theirs."""
    return frame.toDF(*map(str, range(len(frame.columns))))
