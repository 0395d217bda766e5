"""Snapshot rows as the first rows of a history of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwater.model.table import Table
from headwater.pipeline.sinks.sink import Part
from headwater.pipeline.transform.scd2 import SNAPSHOT
from headwater.pipeline.transform.schema import changes_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def as_history(frame: DataFrame, table: Table, parts: Sequence[Part]) -> DataFrame:
    """Return `frame` with the columns that describe a change; rows of partition i get the version of `parts[i]`."""
    from pyspark.sql import functions as f

    versions = f.array(*(f.lit(part.version).cast("bigint") for part in parts))
    version = f.element_at(versions, f.spark_partition_id() + 1)
    values = (f.lit(SNAPSHOT), version, f.lit(None).cast("timestamp"), version, f.lit(None).cast("string"))
    names = changes_schema(table).names[-5:]
    return frame.select("*", *(value.alias(name) for value, name in zip(values, names, strict=True)))
