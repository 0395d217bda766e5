"""Requests before a read: the state of the log, the shape of the table, and the offset of a time."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from headwater.client import Client, Described
from headwater.errors import NotFound
from headwater.model.clock import ts_of_ms, ts_text
from headwater.pipeline.spark.options import EARLIEST, LATEST, Options
from headwater.pipeline.transform import schema

if TYPE_CHECKING:
    import pyarrow as pa


def describe_log(
    client: Client,
    options: Options,
    *,
    after: int | None = None,
    wait_ms: int = 0,
    shape: int | None = None,
    step: tuple[int, int] | None = None,
) -> Described:
    """Return the description of the table, or of the first of several, and of its log."""
    return client.describe(options.db, _table(client, options), after=after, wait_ms=wait_ms, shape=shape, step=step)


def start_of(client: Client, options: Options, status: Described) -> int:
    """Return the offset after which a read without a checkpoint begins."""
    start = options.starting_offset
    if options.starting_ms is not None:
        return _at_time(client, options, options.starting_ms)
    if start is None or start == LATEST:
        return status.latest
    return status.horizon - 1 if start == EARLIEST else int(start)


def shape_schema(client: Client, options: Options, status: Described) -> pa.Schema:
    """Return the schema of changes in a former shape of the table, taken from a response in that shape."""
    batches = client.log(
        options.db,
        options.table,
        generation=status.generation,
        after=status.latest - 1,
        upto=status.latest,
        shape=options.shape,
        columns=options.columns,
    )
    with closing(batches):
        return schema.for_spark(next(batches).schema, options.form)


def _table(client: Client, options: Options) -> str:
    if options.table or options.named_tables:
        return options.table or options.named_tables[0]
    found = client.call("schema.list_tables", db=options.db)["tables"]
    if not found:
        raise NotFound(f"database {options.db!r} has no tables")
    first: str = found[0]["name"] if isinstance(found[0], dict) else found[0]
    return first


def _at_time(client: Client, options: Options, ms: int) -> int:
    """Return the last offset at or before a time, found by creating and closing a subscription."""
    subscribed = client.subscribe_table(
        db=options.db, table=_table(client, options), start={"ts": ts_text(ts_of_ms(ms))}
    )
    client.call("cdc.close", sub_id=subscribed.sub_id)
    return subscribed.offset
