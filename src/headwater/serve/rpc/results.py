"""Results of the services, converted to the JSON of RPC."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.model import formats
from headwater.model.clock import ts_text
from headwater.model.literal import UNAVAILABLE, to_lit, to_plain
from headwater.model.table import Column, Row, Table
from headwater.queries.rows.rows import FoundRow, StoredResult
from headwater.queries.statements.schema import SchemaChangeResult
from headwater.queries.statements.sql import Outcome
from headwater.queries.statements.transactions import BeginResult, EndResult
from headwater.ranges.pull.table_status import Described
from headwater.ranges.ranges.ranges import RangeList, RegisteredLease
from headwater.serve.rpc.query_body import written_data
from headwater.sources.query import ReadResult

OBJECTS = "application/vnd.headwater.objects+json"  # a row whose values are `Lit`s
ROW_FORMATS = {None: to_lit, formats.OBJECTS: to_lit, formats.PLAIN: to_plain}


def check_row_format(name: str | None) -> None:
    """Raise InvalidRequest unless rows can be written in format `name`."""
    if name not in ROW_FORMATS:
        raise InvalidRequest(f"unknown format {name!r}", hint="Use objects_json or plain_json.")


def _known(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def found(result: FoundRow, format: str | None) -> dict[str, Any]:
    """Return the result of data.get."""
    write, index = ROW_FORMATS[format], result.table.index
    row = {column.name: write(result.row[index[column.name]]) for column in result.table.visible}
    return {"row": row, **_known(etag=result.etag)}


def row_body(table: Table, row: Row, *, lits: bool) -> bytes:
    """Return a row as a JSON object for the row routes; plain JSON omits values that the source did not send."""
    pairs = [(column.name, row[table.index[column.name]]) for column in table.visible]
    if lits:
        return msgspec.json.encode({name: to_lit(value) for name, value in pairs})
    return msgspec.json.encode({name: to_plain(value) for name, value in pairs if value is not UNAVAILABLE})


def stored(result: StoredResult) -> dict[str, Any]:
    """Return the result of data.insert, data.update or data.delete."""
    written = {"affected": result.affected, "last_insert_id": result.last_insert_id}
    rows = result.returning
    lits = None if rows is None else [dict(zip(result.columns, map(to_lit, row), strict=True)) for row in rows]
    return written | _known(returning=lits, etag=result.etag, causality=result.causality)


def outcome(result: Outcome, as_objects: bool) -> dict[str, Any]:
    """Return the result of sql.exec."""
    read = ReadResult(result.columns, result.rows, 0, result.truncated)
    data = written_data(read, formats.OBJECTS if as_objects else formats.ROWS)
    written = {"affected": result.affected, "last_insert_id": result.last_insert_id}
    return {"result": {"data": data, **written, **_known(causality=result.causality)}}


def begun(result: BeginResult) -> dict[str, Any]:
    """Return the result of tx.begin."""
    return {"tx": result.tx, "tx_id": result.tx, "db": result.db, "read_only": result.read_only}


def finished(result: EndResult) -> dict[str, Any]:
    """Return the result of tx.commit or tx.rollback."""
    return {"tx": result.tx, "tx_id": result.tx, "status": result.status, **_known(causality=result.causality)}


def done(result: SchemaChangeResult) -> dict[str, Any]:
    """Return the result of a schema.create_* or schema.drop_* method."""
    return {"ok": True, "changed": result.changed, **_known(causality=result.causality)}


def described(db: str, table: Table) -> dict[str, Any]:
    """Return the result of schema.describe_table."""
    return {
        "db": db,
        "table": table.name,
        "columns": [_column(column) for column in table.visible],
        "primary_key": list(table.primary_key),
        "schema": table.version,
    }


def _column(column: Column) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "name": column.name,
        "type": {"kind": column.kind},
        "nullable": column.nullable,
        "declared": column.declared,
    }
    return answer | _known(generated=column.generated or None, auto_increment=column.auto or None)


def pulled(seen: Described) -> dict[str, Any]:
    """Return the result of pull.describe."""
    table, changed_to = seen.table, seen.changed_to
    answer: dict[str, Any] = {
        "db": seen.db,
        "generation": seen.generation,
        "horizon": seen.horizon,
        "latest": seen.latest,
        "table_latest": seen.table_latest,
        "caught_up": seen.caught_up,
        "version": f"{seen.generation}.{seen.latest}",
        "key": list(table.primary_key),
        "table": _shape(table),
    }
    return answer | _known(
        closed_ts=ts_text(seen.closed) if seen.closed else None,
        remedy=seen.remedy or None,
        schema_changed_at=seen.schema_changed_at,
        resnapshot=None if seen.schema_changed_at is None else seen.resnapshot,
        changed_to=None if changed_to is None else _shape(changed_to),
        step_upto=seen.step_upto,
    )


def _shape(table: Table) -> dict[str, Any]:
    return {**msgspec.to_builtins(table), "key": list(table.key), "version": table.version}


def listed(found: RangeList) -> dict[str, Any]:
    """Return the result of pull.ranges, pull.split or pull.merge."""
    return {"generation": found.generation, "ranges": [one.wire() for one in found.ranges]}


def registered(found: RegisteredLease) -> dict[str, Any]:
    """Return the result of pull.register."""
    return {
        "generation": found.generation,
        "init_snapshot_version": found.version,
        "lease_seconds": found.lease_seconds,
    }
