"""Following the shape of a table from one change to the next: where the next one is, and what it brings."""

from __future__ import annotations

from contextlib import closing

import msgspec

from headwater.client import Client, Described
from headwater.model.table import Table
from headwater.pipeline.run.spec import TableSpec
from headwater.pipeline.run.stages import PIN
from headwater.pipeline.run.table_plan import chosen
from headwater.pipeline.sinks.sink import State


def beyond_held(client: Client, spec: TableSpec, state: State, seen: Described) -> Described:
    """`seen`, with the first change of the shape that the sink does not have yet: it takes one before its offset."""
    while seen.changed_to is not None and not seen.resnapshot and _holds(spec, state.plan.table, seen.changed_to):
        later = client.describe(spec.db, spec.table, after=seen.schema_changed_at, shape=state.plan.table.version)
        seen = msgspec.structs.replace(
            seen,
            schema_changed_at=later.schema_changed_at,
            changed_to=later.changed_to,
            resnapshot=later.resnapshot,
        )
    return seen


def _holds(spec: TableSpec, held: Table, shape: Table) -> bool:
    """Whether the sink has this shape; one that was told before it was final has the same version, not the names.

    A pinned sink has every shape that still has its columns.
    """
    if spec.schema == PIN:
        return narrowed(held, shape) == held
    return held.version == shape.version and held.names == chosen(spec, shape).names


def following(spec: TableSpec, held: Table, seen: Described) -> Table:
    """The shape that a sink which has `held` takes next."""
    shape = seen.changed_to or seen.table
    return narrowed(held, shape) if spec.schema == PIN else chosen(spec, shape)


def narrowed(held: Table, shape: Table) -> Table:
    """`held` without the columns that are gone from `shape`: one that has the name of such a column later is new."""
    return msgspec.structs.replace(held, columns=tuple(each for each in held.columns if each.name in shape.index))


def came_filled(client: Client, spec: TableSpec, state: State, seen: Described, shape: Table) -> bool:
    """Whether rows had values in columns that are new in `shape` from the start: no change tells those.

    They come by a DEFAULT, or with a column that had another name. Only the present shape can be looked into: a column
    that is gone from it need not be filled.
    """
    known = {*state.plan.table.names, *(name for name in shape.names if name not in seen.table.names)}
    columns = [column.name for column in shape.visible if column.name not in known]
    if not columns:
        return False
    at, changed_at = state.offset, seen.schema_changed_at
    while changed_at is not None:
        at = max(at, changed_at)
        later = client.describe(spec.db, spec.table, after=changed_at, shape=state.plan.table.version)
        changed_at = later.schema_changed_at
    where = " OR ".join('"' + name.replace('"', '""') + '" IS NOT NULL' for name in columns)
    where = f"({spec.where}) AND ({where})" if spec.where else where
    version = f"{state.plan.generation}.{at}"
    with closing(client.snapshot(spec.db, spec.table, version=version, where=where)) as batches:
        return any(batch.num_rows for batch in batches)
