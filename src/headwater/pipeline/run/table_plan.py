"""The part of a table that a pipeline carries, and checks that a sink holds exactly that part. Pure."""

from __future__ import annotations

import msgspec

from headwater.errors import PipelineError, SchemaChanged, SinkUnfit
from headwater.model.table import Table
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.sinks.sink import Plan
from headwater.pipeline.spark.options import PIN


def carried_table(spec: TableSpec, table: Table, held: Table | None = None) -> Table:
    """Return `table` with the carried columns, always with its key; a pinned table has the columns of `held`."""
    if held is not None and spec.schema == PIN:
        return _pinned(table, held)
    return _only(table, {*spec.columns}) if spec.columns else table


def _pinned(table: Table, held: Table) -> Table:
    there = set(table.names)
    if gone := [name for name in held.names if name not in there]:
        raise SchemaChanged(
            f"the sink is pinned to column {gone[0]!r}, which table {table.name!r} no longer has",
            hint="Set schema to `evolve`, or run `headwater pipeline reset` to take the table as it is.",
        )
    return _only(table, {*held.names})


def _only(table: Table, names: set[str]) -> Table:
    kept = tuple(column for column in table.columns if column.name in names | {*table.key})
    return msgspec.structs.replace(table, columns=kept)


def check_origin(plan: Plan, spec: PipelineSpec, table: TableSpec) -> None:
    """Raise SinkUnfit unless this pipeline filled the sink from this table: two origins must not mix."""
    named = msgspec.structs.replace(plan.table, name=table.table)
    wanted = msgspec.structs.replace(plan, db=table.db, pipeline=spec.name, table=named)
    if wanted.origin != plan.origin:
        raise SinkUnfit(
            f"the sink holds {plan.origin}, not {wanted.origin}",
            hint="Give this table a sink location of its own, or remove the existing data.",
        )


def check_choice(plan: Plan, spec: TableSpec) -> None:
    """Raise PipelineError if the sink was filled with other columns or another filter than the spec has now."""
    if plan.columns == spec.columns and plan.where == spec.where:
        return
    what = "with other columns" if plan.columns != spec.columns else "with another `where`"
    raise PipelineError(
        f"the sink was filled {what} than the pipeline file names",
        hint="Restore the old setting, or run `headwater pipeline reset` to take a new snapshot.",
    )
