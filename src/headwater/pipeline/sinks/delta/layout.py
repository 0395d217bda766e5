"""The layout of a Delta sink, shared by delta-rs and delta-spark: columns, properties, transactions, merges.

    property headwater.plan             the plan, as JSON; a commit that changes it fails all that began before
    property headwater.begun            when the plan was begun, in milliseconds
    transaction headwater/<plan>        the offset of the last step; OVER once the plan is closed
    transaction headwater/<plan>/<span> the version of a part that is loaded

No deletion vectors and no column mapping: the files hold exactly the rows and columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from headwater.errors import SinkUnfit
from headwater.model.keys.key import Span
from headwater.model.table import Table
from headwater.pipeline.sinks.sink import HISTORY, Plan, State
from headwater.pipeline.transform.compaction import DELETED, ChangeColumns, quoted, unused_name
from headwater.pipeline.transform.scd2 import CLOSE, OPEN, Versioned, versioned
from headwater.pipeline.transform.schema import TEXT, changes_schema, identity_of, rows_schema

if TYPE_CHECKING:
    import pyarrow as pa

PLAN, BEGUN = "headwater.plan", "headwater.begun"
STATISTICS = "delta.dataSkippingStatsColumns"
_INDEXED = 32  # columns with statistics, as by default
_FLOAT_DIGITS = 15
OVER = 2**63 - 1  # closes a plan: delta-spark runs no step whose number is not above the recorded number
SOURCE, TARGET = "s", "t"


def step_app(plan: str) -> str:
    """Return the name of the transaction that holds a plan's offset."""
    return f"headwater/{plan}"


def part_app(plan: str, span: Span) -> str:
    """Return the name of the transaction that marks `span` as loaded."""
    return f"headwater/{plan}/{span.start.hex()}-{'' if span.end is None else span.end.hex()}"


def plan_of(properties: Mapping[str, str | None]) -> Plan | None:
    """Return the plan in a table's properties; None if there is none."""
    written = properties.get(PLAN)
    return msgspec.json.decode(written, type=Plan) if written else None


def plan_text(plan: Plan) -> str:
    """Return the plan as the text that `plan_of` reads."""
    return msgspec.json.encode(plan).decode()


def state_of(plan: Plan, read: Callable[[str], int | None], *, is_even: bool = False) -> State:
    """Return the progress of a table; `read` returns the number of a transaction, `is_even` skips those of spans."""
    offset = read(step_app(plan.id))
    found = {} if is_even else {span: read(part_app(plan.id, span)) for span in plan.spans}
    loaded = {span: version for span, version in found.items() if version is not None}
    if offset is None:
        return State(plan, plan.offset, loaded)
    return State(plan, offset, {span: version for span, version in loaded.items() if version > offset})


# Columns


def names_of(table: Table) -> tuple[list[str], Versioned]:
    """Return the names of the columns of rows, and of the additional columns of a history."""
    names = rows_schema(table).names
    return names, versioned(ChangeColumns(*changes_schema(table).names[-5:]), names)


def held_schema(table: Table, mode: str, types: str = TEXT) -> pa.Schema:
    """Return the schema that the Delta table has for `table`."""
    import pyarrow as pa

    rows = rows_schema(table, types=types)
    if mode != HISTORY:
        return rows
    _, held = names_of(table)
    time = pa.timestamp("us", tz="UTC")
    kinds = [pa.string(), pa.int64(), pa.int64(), pa.string(), time, time, pa.bool_()]
    return pa.schema([*rows, *(pa.field(name, kind) for name, kind in zip(held, kinds, strict=True))])


def statistics(schema: pa.Schema) -> dict[str, str]:
    """Return the property that names the columns with statistics; {} if all may have them.

    delta-rs writes the bounds of a decimal as floats: readers would skip the very file that has a long number.
    """
    import pyarrow as pa

    def is_long(kind: pa.DataType) -> bool:
        return bool(pa.types.is_decimal(kind) and kind.precision > _FLOAT_DIGITS)

    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_temporal, pa.types.is_decimal)
    if not any(is_long(field.type) for field in schema):
        return {}
    exact = [field for field in list(schema)[:_INDEXED] if not is_long(field.type)]
    names = [quoted(field.name) for field in exact if any(is_kind(field.type) for is_kind in kinds)]
    return {STATISTICS: ",".join(names)}


def added(held: pa.Schema, wanted: pa.Schema) -> list[pa.Field]:
    """Return the fields that `held` lacks; raise SinkUnfit if a field differs in type or in letter case."""
    known = {field.name.lower(): field for field in held}
    for field in wanted:
        there = known.get(field.name.lower(), field)
        if not there.type.equals(field.type) or there.name != field.name:
            raise SinkUnfit(
                f"column {field.name!r} has type {field.type}; the lake has column {there.name!r} of type {there.type}",
                hint='Take a new snapshot (`headwater pipeline reset`), or set schema = "pin".',
            )
    return [field for field in wanted if field.name.lower() not in known]


def check_identity(before: Table, after: Table) -> None:
    """Raise SinkUnfit if the key columns have changed."""
    was, now = identity_of(before), identity_of(after)
    if was != now:
        raise SinkUnfit(
            f"the key of table {after.name!r} was {', '.join(was)} and is {', '.join(now)} now",
            hint="Take a new snapshot: `headwater pipeline reset`.",
        )


# Merges


class Merge(msgspec.Struct, frozen=True):
    """The clauses of a MERGE, in SQL that both engines accept; t is the table, s the incoming rows."""

    on: str
    delete_if: str  # for matching rows; empty: no row is deleted
    update_if: str
    update: dict[str, str]
    insert_if: str  # for rows without a match
    insert: dict[str, str]


def merge_of(table: Table, mode: str, held: Sequence[str]) -> Merge:
    """Return the merge of a step into a table that has the columns `held`."""
    return history_of(table) if mode == HISTORY else upsert_of(table, held)


def upsert_of(table: Table, held: Sequence[str]) -> Merge:
    """Return the merge for rows from `last_per_key`; idempotent, also after a shorter step with an equal start."""
    names = rows_schema(table).names
    gone = _of(SOURCE, unused_name(DELETED, changes_schema(table).names))
    every = {quoted(name): _of(SOURCE, name) for name in names}
    dropped = {quoted(name): "NULL" for name in held if name not in names}
    return Merge(_same_key(table), gone, f"NOT {gone}", every | dropped, f"NOT {gone}", every)


def history_of(table: Table) -> Merge:
    """Return the merge for rows from `versions`; a version that exists is found by its offset and is only closed."""
    names, held = names_of(table)
    what = _of(SOURCE, unused_name("_action", [*names, *held]))
    current, offset, opened = _of(TARGET, held.is_current), _of(TARGET, held.offset), _of(SOURCE, held.offset)
    on = (
        f"{_same_key(table)} AND (({what} = '{CLOSE}' AND {current} AND {offset} < {opened})"
        f" OR ({what} = '{OPEN}' AND {offset} = {opened}))"
    )
    ends = {quoted(name): _of(SOURCE, name) for name in (held.valid_to, held.is_current)}
    every = {quoted(name): _of(SOURCE, name) for name in (*names, *held)}
    return Merge(on, "", current, ends, f"{what} = '{OPEN}'", every)


def _same_key(table: Table) -> str:
    return " AND ".join(f"{_of(TARGET, name)} = {_of(SOURCE, name)}" for name in identity_of(table))


def _of(side: str, name: str) -> str:
    return f"{side}.{quoted(name)}"
