"""The sequence of shape changes of a table: the next change after the sink's shape, and the columns it adds."""

from __future__ import annotations

from contextlib import closing

import msgspec

from headwater.client import Client, Described
from headwater.model.table import Table
from headwater.pipeline.run.spec import TableSpec
from headwater.pipeline.run.table_plan import carried_table
from headwater.pipeline.sinks.sink import State
from headwater.pipeline.spark.options import PIN


def with_next_shape_change(client: Client, spec: TableSpec, state: State, status: Described) -> Described:
    """Return `status` with the first shape change that the sink lacks: a sink's shape may be ahead of its offset."""
    while status.changed_to is not None and not status.resnapshot and _holds(spec, state.plan.table, status.changed_to):
        later = client.describe(spec.db, spec.table, after=status.schema_changed_at, shape=state.plan.table.version)
        status = msgspec.structs.replace(
            status,
            schema_changed_at=later.schema_changed_at,
            changed_to=later.changed_to,
            resnapshot=later.resnapshot,
        )
    return status


def _holds(spec: TableSpec, held: Table, shape: Table) -> bool:
    """Return whether the sink has this shape; a shape sent before it was final has the version, but other names.

    A pinned sink has every shape that still has its columns.
    """
    if spec.schema == PIN:
        return narrowed(held, shape) == held
    return held.version == shape.version and held.names == carried_table(spec, shape).names


def following(spec: TableSpec, held: Table, status: Described) -> Table:
    """Return the next shape for a sink that has the shape `held`."""
    shape = status.changed_to or status.table
    return narrowed(held, shape) if spec.schema == PIN else carried_table(spec, shape)


def narrowed(held: Table, shape: Table) -> Table:
    """Return `held` without the columns that `shape` lacks: a later column of such a name is a new column."""
    return msgspec.structs.replace(held, columns=tuple(each for each in held.columns if each.name in shape.index))


def has_initial_values(client: Client, spec: TableSpec, state: State, status: Described, shape: Table) -> bool:
    """Return whether rows had values in the new columns of `shape` from the start, which no change reports.

    Such values result from a DEFAULT or from a renamed column. Only the current shape can be read: a column that it
    lacks need not be filled.
    """
    known = {*state.plan.table.names, *(name for name in shape.names if name not in status.table.names)}
    columns = [column.name for column in shape.visible if column.name not in known]
    if not columns:
        return False
    at, changed_at = state.offset, status.schema_changed_at
    while changed_at is not None:
        at = max(at, changed_at)
        later = client.describe(spec.db, spec.table, after=changed_at, shape=state.plan.table.version)
        changed_at = later.schema_changed_at
    where = " OR ".join('"' + name.replace('"', '""') + '" IS NOT NULL' for name in columns)
    where = f"({spec.where}) AND ({where})" if spec.where else where
    version = f"{state.plan.generation}.{at}"
    with closing(client.snapshot(spec.db, spec.table, version=version, where=where)) as batches:
        return any(batch.num_rows for batch in batches)
