"""End rows: the last row of each part is not a row of the table; it holds the number of rows before it.

A task cannot detect whether its input was read to the end or died: Spark closes the stream in both cases, and Arrow
treats that as the end. Tasks that commit by themselves therefore compare the count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.errors import Unavailable
from headwater.pipeline.failure import note
from headwater.pipeline.transform.compaction import unused_name

if TYPE_CHECKING:
    import pyarrow as pa


def with_end(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with the end column, always its last."""
    import pyarrow as pa

    return schema.append(pa.field(unused_name("_end", schema.names), pa.int64()))


def ended(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield `batches` with an end column, then the end row; `schema` is the result of `with_end` for their schema."""
    import pyarrow as pa

    rows = 0
    for batch in batches:
        rows += batch.num_rows
        none = pa.nulls(batch.num_rows, pa.int64())
        yield pa.record_batch([*batch.columns, none], schema=schema)
    nothing = [pa.nulls(1, field.type) for field in schema][:-1]
    yield pa.record_batch([*nothing, pa.array([rows])], schema=schema)


def checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches without the end row and column; raise Unavailable after the last if the count differs."""
    import pyarrow.compute as pc

    rows, told = 0, None
    for batch in batches:
        ends = batch.column(batch.num_columns - 1)
        if ends.null_count < batch.num_rows:
            told = pc.max(ends).as_py()
            batch = batch.filter(pc.is_null(ends))
        rows += batch.num_rows
        yield batch.select(range(batch.num_columns - 1))
    if told != rows:
        raise note(Unavailable(f"a part was truncated after {rows} rows", hint="It is read again."))
