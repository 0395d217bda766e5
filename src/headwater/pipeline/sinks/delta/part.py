"""The Spark task that appends the rows of one part to a Delta table, with the part's version, in one commit.

A commit cannot be undone if the task fails later, so a part is committed only with its end (see part_ends.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.pipeline.sinks.delta.layout import BEGUN, names_of, part_app, plan_of
from headwater.pipeline.sinks.sink import HISTORY, Part, Plan
from headwater.pipeline.spark.part_ends import checked
from headwater.pipeline.transform.compaction import no_key
from headwater.pipeline.transform.scd2 import SNAPSHOT
from headwater.pipeline.transform.schema import fit, identity_of

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable

DONE, FENCED, UNFIT = "done", "fenced", "unfit"
REPORT = "part int, outcome string, problem string"
_COMMIT_RETRIES = 200  # for parts that commit concurrently; a retry only rewrites a small file


class TableLocation(msgspec.Struct, frozen=True):
    """The location of a table, as passed to delta-rs."""

    path: str
    storage_options: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"TableLocation({self.path!r})"  # the options may hold secrets

    def open(self) -> DeltaTable | None:
        """Return the table at its newest version; None if it does not exist."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self.path, storage_options=self.storage_options or None)
        except TableNotFoundError:
            return None


def committing(app: str | None, number: int = 0, *, retries: int = 0) -> CommitProperties:
    """Return commit properties with our transaction; without retries, any concurrent commit makes the commit fail."""
    from deltalake import CommitProperties, Transaction

    told = [Transaction(app, number)] if app else None
    return CommitProperties(app_transactions=told, max_commit_retries=retries)


class PartWriter(msgspec.Struct, frozen=True):
    """The Spark task that writes one partition. Two attempts may run, also concurrently."""

    location: TableLocation
    plan: Plan
    parts: tuple[Part, ...]
    mode: str
    file_bytes: int
    names: tuple[str, ...] = ()  # the real column names; frames have numbers instead

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        place = context.partitionId() if context else 0
        named = (batch.rename_columns(list(self.names)) for batch in batches)
        outcome, problem = self.write(self.parts[place], named)
        kinds = pa.schema([("part", pa.int32()), ("outcome", pa.string()), ("problem", pa.string())])
        yield pa.RecordBatch.from_pydict({"part": [place], "outcome": [outcome], "problem": [problem]}, schema=kinds)

    def write(self, part: Part, batches: Iterator[pa.RecordBatch]) -> tuple[str, str]:
        """Commit the part unless it is loaded; return the outcome and the unfit column. `batches` need an end row."""
        from deltalake.exceptions import CommitFailedError

        outcome, table = self._find_outcome(part)
        if outcome is not None or table is None:
            return outcome or FENCED, ""
        rows = _Rows(self, table, part, checked(batches))
        try:
            self._append(table, part, rows)
        except CommitFailedError:
            outcome, _ = self._find_outcome(part)
            if outcome is None:
                raise
            return outcome, ""
        except Exception:
            if rows.unfit is None:
                raise  # includes a truncated part: its task has already failed and is retried
            return UNFIT, rows.unfit
        return DONE, ""

    def _find_outcome(self, part: Part) -> tuple[str | None, DeltaTable | None]:
        """Return the outcome if the part is already decided, otherwise None, and the table that was read."""
        table = self.location.open()
        held = plan_of(table.metadata().configuration) if table else None
        if table is None or held is None or held.id != self.plan.id:
            return FENCED, table
        return (DONE if table.transaction_version(part_app(held.id, part.span)) is not None else None), table

    def _append(self, table: DeltaTable, part: Part, rows: _Rows) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        # The second of two attempts fails: delta-rs rejects a transaction that a newer commit already carries.
        write_deltalake(
            table,
            pa.RecordBatchReader.from_batches(rows.schema, iter(rows)),
            mode="append",
            target_file_size=self.file_bytes,
            commit_properties=committing(part_app(self.plan.id, part.span), part.version, retries=_COMMIT_RETRIES),
        )


class _Rows:
    """The batches of a part in the table's schema; `unfit` names a key column that contains a null."""

    def __init__(self, writer: PartWriter, table: DeltaTable, part: Part, batches: Iterator[pa.RecordBatch]) -> None:
        import pyarrow as pa

        self.schema = pa.schema(table.schema().to_arrow())
        self.unfit: str | None = None
        self._batches, self._identity = batches, identity_of(writer.plan.table)
        self._same: dict[str, Any] = {}
        if writer.mode == HISTORY:
            _, held = names_of(writer.plan.table)
            begun = int(table.metadata().configuration.get(BEGUN) or 0) * 1000
            self._same = dict(zip(held, (SNAPSHOT, part.version, part.version, None, begun, None, True), strict=True))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.unfit = next((name for name in self._identity if batch.column(name).null_count), None)
            if self.unfit is not None:
                raise no_key(self.unfit)
            yield whole(batch, self.schema, self._same)


def whole(batch: pa.RecordBatch, schema: pa.Schema, same: Mapping[str, Any]) -> pa.RecordBatch:
    """Return the batch in the schema of the table; a column that it lacks has the value of `same` in all rows, or null.

    A batch lacks columns of a history, columns dropped from the source, and columns added after a file was written.
    """
    import pyarrow as pa

    for field in schema:
        if field.name not in batch.schema.names:
            value = pa.scalar(same.get(field.name), field.type)
            batch = batch.append_column(field.name, pa.repeat(value, batch.num_rows))
    return fit(batch, schema)
