"""Streaming queries for tests: their batches and their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from headwater.errors import HeadwaterError

Batches = list[tuple[int, list[dict[str, Any]]]]  # the number of a batch, and its rows


class Stream:
    """A query over one checkpoint folder; `delivered` collects the batches of all its runs."""

    def __init__(self, spark: SparkSession, folder: Path, url: str, **options: Any) -> None:
        self.spark, self.folder = spark, folder
        self.options = {"url": url, "table": "t", "startingOffset": "earliest", **options}
        self.delivered: Batches = []

    def start(self, available_now: bool, **options: Any) -> StreamingQuery:
        read = self.spark.readStream.format("headwater").options(**self.options | options).load()
        write = read.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.folder))
        return (
            write.trigger(availableNow=True) if available_now else write.trigger(processingTime="0 seconds")
        ).start()

    def _take(self, frame: Any, number: int) -> None:
        self.delivered.append((number, frame.toArrow().to_pylist()))

    def run(self, **options: Any) -> Batches:
        """Process everything available; return the batches of this run."""
        before = len(self.delivered)
        self.start(True, **options).awaitTermination()
        return self.delivered[before:]

    def failure(self, **options: Any) -> HeadwaterError:
        """Run the query; return the error that ends it."""
        from headwater.pipeline.failure import cause_of

        try:
            self.run(**options)
        except Exception as error:
            return cause_of(error)
        raise AssertionError("the query did not fail")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return all delivered rows, without repeated batches."""
        return [row for rows in dict(self.delivered).values() for row in rows]

    # The checkpoint

    @property
    def last_batch(self) -> int:
        return max(int(path.name) for path in (self.folder / "offsets").iterdir() if path.name.isdigit())

    def forget_commit(self) -> None:
        """Remove the commit of the last batch, as if the process had died before it."""
        for path in (self.folder / "commits").glob(f"*{self.last_batch}*"):
            path.unlink()

    def place(self) -> dict[str, Any]:
        """Return the last offset of the checkpoint."""
        return json.loads((self.folder / "offsets" / str(self.last_batch)).read_text().splitlines()[-1])

    def move(self, **place: Any) -> None:
        """Change fields of the last offset in the checkpoint."""
        path = self.folder / "offsets" / str(self.last_batch)
        *head, last = path.read_text().splitlines()
        path.write_text("\n".join([*head, json.dumps(json.loads(last) | place)]))
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
