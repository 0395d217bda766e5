"""A model of a changing table: its rows at every offset, its changes, and both as Spark frames."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from tests.suite.deadlines import PATIENCE

from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.pipeline.sinks.sink import Part, Plan, Step
from headwater.pipeline.spark.part_ends import ended, with_end
from headwater.pipeline.transform.schema import changes_schema, rows_schema, struct_of

Row = dict[str, Any]

KINDS = {
    "id": "i64",
    "name": "str",
    "total": "f64",
    "data": "bytes",
    "big": "u64",
    "ok": "bool",
    "vec": "embedding",
    "price": "dec",
}
TABLE = Table("t", tuple(Column(name, kind) for name, kind in KINDS.items()), ("id",))
MIDDLE = encode_key((100,))
SPANS = (Span(b"", MIDDLE), Span(MIDDLE, None))


def row(key: int, name: str | None = "x", **values: Any) -> Row:
    return {column.name: None for column in TABLE.columns} | {"_misfit": None, "id": key, "name": name} | values


def canon(rows: Sequence[Row]) -> list[list[tuple[str, str]]]:
    """Return rows in a canonical order, with values that equal themselves (NaN does not)."""
    return sorted(sorted((name, _shown(value)) for name, value in row.items()) for row in rows)


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return repr(int(value) if isinstance(value, Decimal) and value == int(value) else value)


class Story:
    """Changes from offset 1 on; `rows_at[n]` are the rows by key at offset n."""

    def __init__(self, table: Table = TABLE) -> None:
        self.table = table
        self.rows_at: list[dict[int, Row]] = [{}]
        self.images: list[Row] = []

    @property
    def offset(self) -> int:
        return len(self.rows_at) - 1

    @property
    def rows(self) -> dict[int, Row]:
        return self.rows_at[-1]

    def insert(self, new: Row) -> None:
        assert new["id"] not in self.rows
        self._change([("insert", new)])

    def update(self, key: int, new: Row) -> None:
        assert new["id"] == key or new["id"] not in self.rows
        self._change([("update_preimage", self.rows[key]), ("update_postimage", new)])

    def delete(self, key: int) -> None:
        self._change([("delete", self.rows[key])])

    def _change(self, images: list[tuple[str, Row]]) -> None:
        rows, offset = dict(self.rows), self.offset + 1
        about = {
            "_commit_version": offset,
            "_commit_timestamp": datetime.fromtimestamp(1_800_000_000 + offset, UTC),
            "_offset": offset,
            "_txn": f"t{offset}",
        }
        for kind, image in images:
            self.images.append(image | {"_change_type": kind} | about)
            if kind in ("update_preimage", "delete"):
                del rows[image["id"]]
            else:
                rows[image["id"]] = image
        self.rows_at.append(rows)

    # What a pipeline makes of it

    def plan(self, name: str, spans: Sequence[Span] = SPANS) -> Plan:
        return Plan(name, "g1", self.offset, tuple(spans), self.table)

    def part_rows(self, part: Part) -> list[Row]:
        return [row for key, row in self.rows_at[part.version].items() if part.span.contains(encode_key((key,)))]

    def loading(
        self,
        spark: SparkSession,
        parts: Sequence[Part],
        gate: Gate | None = None,
        *,
        ends: bool = False,
        dies: Path | None = None,
    ) -> DataFrame:
        """Return the frame for `load`."""
        rows = [self.part_rows(part) for part in parts]
        return frame_of(spark, rows_schema(self.table), rows, gate, ends=ends, dies=dies)

    def step(self, plan: Plan, after: int, upto: int) -> Step:
        return Step(plan.id, plan.generation, after, upto)

    def changes(
        self,
        spark: SparkSession,
        after: int,
        upto: int,
        reached: Callable[[int], int] = lambda key: 0,
        gate: Gate | None = None,
    ) -> DataFrame:
        """Return the frame for `apply`, in two partitions; of each key only changes after its offset `reached`."""
        told = [
            image
            for image in self.images
            if after < image["_offset"] <= upto and image["_offset"] > reached(image["id"])
        ]
        return frame_of(spark, changes_schema(self.table), [told[::2], told[1::2]], gate)


class Slow:
    """A function that runs in a thread; calling the object waits for its end and raises its error."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(act,))
        self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._raised.append(error)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def __call__(self) -> BaseException | None:
        self._thread.join(PATIENCE)
        assert self.is_over
        return self._raised[0] if self._raised else None


class Gate:
    """A point where one task waits until the test lets it continue."""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / name) for name in ("passed", "reached", "go")]
        for fifo in self.paths[1:]:
            os.mkfifo(fifo)

    def reached(self) -> None:
        """Wait until a task is at the gate."""
        place = os.open(self.paths[1], os.O_RDONLY | os.O_NONBLOCK)
        try:
            ready, _, _ = select.select([place], [], [], PATIENCE)
            assert ready, "no task came to the gate"
        finally:
            os.close(place)

    def go(self, slow: Slow) -> None:
        """Let the task continue, unless `slow` has ended: another task may have failed it."""
        while not slow.is_over:
            try:
                place = os.open(self.paths[2], os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                assert error.errno == errno.ENXIO
                time.sleep(0.01)  # nobody waits there: not yet, or not any more
            else:
                os.close(place)
                return


def frame_of(
    spark: SparkSession,
    schema: pa.Schema,
    parts: Sequence[Sequence[Row]],
    gate: Gate | None = None,
    *,
    ends: bool = False,
    dies: Path | None = None,
) -> DataFrame:
    """Return a frame whose partition i holds parts[i], made in the executors; the first task waits at `gate`.

    With `ends` each part has an end mark. The task of the first part dies midway until the file `dies` exists.
    """
    written = [_written(schema, rows) for rows in parts]
    paths = gate.paths if gate else None
    whole = with_end(schema) if ends else schema
    death = str(dies or "")

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        list(batches)  # a worker that leaves something unread is not used again, and a new one takes a second
        place = TaskContext.get().partitionId()
        batches = pa.ipc.open_stream(written[place])
        for batch in ended(batches, whole) if ends else batches:
            yield batch
            if death and place == 0:
                die(death)
        if paths is not None and place == 0:
            wait(*paths)

    def wait(passed: str, reached: str, go: str) -> None:
        from pathlib import Path

        try:
            Path(passed).touch(exist_ok=False)
        except FileExistsError:
            return
        Path(reached).write_bytes(b"here")
        Path(go).read_bytes()

    def die(once: str) -> None:
        from pathlib import Path

        with contextlib.suppress(FileExistsError):
            Path(once).touch(exist_ok=False)
            os._exit(9)

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(make, struct_of(whole))


def _written(schema: pa.Schema, rows: Sequence[Row]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(list(rows), schema), max_chunksize=1000)
    return bytes(sink.getvalue().to_pybytes())
