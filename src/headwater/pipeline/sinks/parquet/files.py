"""Durable files: Parquet files written by tasks, and small files written by the driver."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

REPORT = "partition int, file string"


class WrittenFile(msgspec.Struct, frozen=True):
    """The file that one task wrote."""

    partition: int
    file: str


class FileWriter:
    """The Spark task that writes the batches of one partition to a file, and no file for an empty partition."""

    def __init__(self, folder: str, names: Sequence[str], skipped: frozenset[int] = frozenset()) -> None:
        self._folder, self._skipped = folder, skipped
        self._names = list(names)  # the real column names; frames have numbers instead

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        named = (batch.rename_columns(self._names) for batch in batches)
        first = None if partition in self._skipped else next((batch for batch in named if batch.num_rows), None)
        if first is None:
            return
        name = f"part-{partition:05}-{uuid.uuid4().hex}.parquet"
        with open(Path(self._folder) / name, "xb") as file:
            with pq.ParquetWriter(file, first.schema) as writer:
                writer.write_batch(first)
                for batch in named:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        kinds = pa.schema([("partition", pa.int32()), ("file", pa.string())])
        yield pa.RecordBatch.from_pydict({"partition": [partition], "file": [name]}, schema=kinds)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and sync it to disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def durable(path: Path, content: bytes) -> None:
    """Replace a file atomically and sync it to disk."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    write_file(beside, content)
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
