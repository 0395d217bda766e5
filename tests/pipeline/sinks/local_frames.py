"""Replacements of Spark's frames: Arrow partitions, whose tasks run in this process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

PREIMAGES = ("update_preimage", "delete")


class LocalFrame:
    """The part of a DataFrame that the SQL sink uses."""

    def __init__(self, partitions: Sequence[pa.Table]) -> None:
        self.partitions = list(partitions)

    @property
    def columns(self) -> list[str]:
        return list(self.partitions[0].column_names)

    def select(self, *names: str) -> LocalFrame:
        plain = [name[1:-1].replace("``", "`") for name in names]
        return LocalFrame([part.select(plain) for part in self.partitions])

    def toDF(self, *names: str) -> LocalFrame:
        made = copy.copy(self)
        made.partitions = [part.rename_columns(list(names)) for part in self.partitions]
        return made

    def where(self, condition: str) -> LocalFrame:
        found = re.fullmatch(r"`(\w+)` > (\d+)", condition)
        assert found
        return LocalFrame([part.filter(pc.field(found[1]) > int(found[2])) for part in self.partitions])

    def mapInArrow(self, task: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> LocalFrame:
        return LocalFrame([pa.Table.from_batches(list(run(task, *at)), REPORT) for at in enumerate(self.partitions)])

    def collect(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for part in self.partitions for row in part.to_pylist()]


REPORT = pa.schema(
    [("partition", pa.int32()), ("attempt", pa.string()), ("rows", pa.int64()), ("problem", pa.string())]
)


def run(task: Callable[[Iterator[Any]], Iterator[Any]], partition: int, rows: pa.Table) -> Iterator[Any]:
    """Run one attempt of a task as an executor would."""
    context = object.__new__(TaskContext)  # the ordinary way makes it that of the whole process
    context._partitionId = partition
    before, TaskContext._taskContext = TaskContext._taskContext, context
    try:
        yield from task(iter(rows.to_batches(max_chunksize=3)))
    finally:
        TaskContext._taskContext = before


def compacted(frame: LocalFrame, identity: Sequence[str]) -> LocalFrame:
    """Return what `last_per_key` returns, computed in plain Python."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    rows = [row for part in frame.partitions for row in part.to_pylist()]
    for row in sorted(rows, key=lambda row: (row["_offset"], row["_change_type"] != "update_preimage")):
        last[tuple(row[name] for name in identity)] = row
    schema = frame.partitions[0].schema.append(pa.field("_deleted", pa.bool_()))
    marked = [{**row, "_deleted": row["_change_type"] in PREIMAGES} for row in last.values()]
    return LocalFrame([pa.Table.from_pylist(marked[place::2], schema) for place in (0, 1)])
