"""Results of the services, converted to the JSON of RPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.errors import InvalidRequest
from headwater.model import formats
from headwater.model.clock import ts_text
from headwater.model.literal import UNAVAILABLE, Value, to_lit, to_plain
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


def _lits(names: Sequence[str], row: Sequence[Value]) -> dict[str, Any]:
    return {name: to_lit(value) for name, value in zip(names, row, strict=True)}


def found(result: FoundRow, format: str | None) -> dict[str, Any]:
    """data.get"""
    write, index = ROW_FORMATS[format], result.table.index
    row = {column.name: write(result.row[index[column.name]]) for column in result.table.visible}
    return {"row": row} if result.etag is None else {"row": row, "etag": result.etag}


def row_body(table: Table, row: Row, *, lits: bool) -> bytes:
    """Return a row as a JSON object for the row routes; plain JSON omits values that the source did not send."""
    pairs = [(column.name, row[table.index[column.name]]) for column in table.visible]
    if lits:
        return msgspec.json.encode({name: to_lit(value) for name, value in pairs})
    return msgspec.json.encode({name: to_plain(value) for name, value in pairs if value is not UNAVAILABLE})


def stored(result: StoredResult) -> dict[str, Any]:
    """data.insert, data.update, data.delete"""
    answer: dict[str, Any] = {"affected": result.affected, "last_insert_id": result.last_insert_id}
    if result.returning is not None:
        answer["returning"] = [_lits(result.columns, row) for row in result.returning]
    if result.etag is not None:
        answer["etag"] = result.etag
    if result.causality is not None:
        answer["causality"] = result.causality
    return answer


def outcome(result: Outcome, as_objects: bool) -> dict[str, Any]:
    """sql.exec"""
    read = ReadResult(result.columns, result.rows, 0, result.truncated)
    inner: dict[str, Any] = {
        "data": written_data(read, formats.OBJECTS if as_objects else formats.ROWS),
        "affected": result.affected,
        "last_insert_id": result.last_insert_id,
    }
    if result.causality is not None:
        inner["causality"] = result.causality
    return {"result": inner}


def begun(result: BeginResult) -> dict[str, Any]:
    """tx.begin"""
    return {"tx": result.tx, "tx_id": result.tx, "db": result.db, "read_only": result.read_only}


def finished(result: EndResult) -> dict[str, Any]:
    """tx.commit, tx.rollback"""
    answer: dict[str, Any] = {"tx": result.tx, "tx_id": result.tx, "status": result.status}
    return answer if result.causality is None else answer | {"causality": result.causality}


def done(result: SchemaChangeResult) -> dict[str, Any]:
    """schema.create_* and schema.drop_*"""
    answer: dict[str, Any] = {"ok": True, "changed": result.changed}
    return answer if result.causality is None else answer | {"causality": result.causality}


def described(db: str, table: Table) -> dict[str, Any]:
    """schema.describe_table"""
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
    return answer | {field: True for field, holds in _marks(column).items() if holds}


def _marks(column: Column) -> dict[str, bool]:
    return {"generated": column.generated, "auto_increment": column.auto}


def pulled(seen: Described) -> dict[str, Any]:
    """pull.describe"""
    table = seen.table
    answer: dict[str, Any] = {
        "db": seen.db,
        "generation": seen.generation,
        "horizon": seen.horizon,
        "latest": seen.latest,
        "version": f"{seen.generation}.{seen.latest}",
        "key": list(table.primary_key),
        "table": _shape(table),
    }
    if seen.closed:
        answer["closed_ts"] = ts_text(seen.closed)
    if seen.remedy:
        answer["remedy"] = seen.remedy
    if seen.schema_changed_at is not None:
        answer |= {"schema_changed_at": seen.schema_changed_at, "resnapshot": seen.resnapshot}
    if seen.changed_to is not None:
        answer["changed_to"] = _shape(seen.changed_to)
    if seen.step_upto is not None:
        answer["step_upto"] = seen.step_upto
    return answer


def _shape(table: Table) -> dict[str, Any]:
    return {**msgspec.to_builtins(table), "key": list(table.key), "version": table.version}


def listed(found: RangeList) -> dict[str, Any]:
    """pull.ranges, pull.split, pull.merge"""
    return {"generation": found.generation, "ranges": [one.wire() for one in found.ranges]}


def registered(found: RegisteredLease) -> dict[str, Any]:
    """pull.register"""
    return {
        "generation": found.generation,
        "init_snapshot_version": found.version,
        "lease_seconds": found.lease_seconds,
    }
