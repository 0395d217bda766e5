"""Conversion of the type descriptions in schema.create_table to the columns of the model."""

from __future__ import annotations

from collections import Counter

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.suggestion import nearest
from headwater.model.table import KINDS, Column, Table
from headwater.serve.rpc.params import ColumnDesc, CreateTable, TypeDesc

_KINDS = sorted(KINDS - {"any"} | {"varchar"})
_WHOLE = ("i64", "u64")
_CHARSETS = ("utf8", "utf-8", "utf8mb4")
_COLLATIONS = ("binary", "utf8mb4_bin", "utf8_bin")
MAX_NAME = 255


def table_of(params: CreateTable) -> Table:
    """Return the table that `params` describes."""
    check_name(params.table, "table")
    if not params.columns:
        raise InvalidRequest("`columns` is empty", hint="Send at least one column.")
    names = [check_name(column.name, "column") for column in params.columns]
    _once(names, "columns")
    _once(params.primary_key, "primary_key")
    for name in params.primary_key:
        if name not in names:
            raise InvalidRequest(f"primary_key: there is no column {name!r}", hint=nearest(name, names))
    key = tuple(params.primary_key)
    return Table(params.table, tuple(_column(column, key) for column in params.columns), key)


def check_name(name: str, what: str) -> str:
    """Return `name` if it is valid for a table or column; else raise InvalidRequest."""
    if not name or len(name) > MAX_NAME or "\0" in name:
        raise InvalidRequest(f"{name[:40]!r} cannot name a {what}", hint=f"Use 1 to {MAX_NAME} characters.")
    return name


def _once(names: list[str], field: str) -> None:
    twice = [name for name, count in Counter(map(str.lower, names)).items() if count > 1]
    if twice:
        raise InvalidRequest(f"{field}: {twice[0]!r} is repeated", hint="Send each name once.")


def _column(column: ColumnDesc, key: tuple[str, ...]) -> Column:
    _check_type(column.name, column.type)
    kind = "u64" if column.type.unsigned else "str" if column.type.kind == "varchar" else column.type.kind
    if column.auto_increment and (key != (column.name,) or kind not in _WHOLE):
        raise NotSupported(
            f"auto_increment on column {column.name!r} is not supported",
            hint="Only a primary key of one i64 or u64 column can auto-increment.",
        )
    nullable = column.name not in key if column.nullable is None else column.nullable
    return Column(column.name, kind, nullable=nullable, auto=column.auto_increment)


def _check_type(name: str, type: TypeDesc) -> None:
    """Raise an error for a type, limit or collation that the database would not enforce, instead of ignoring it."""
    if type.kind not in _KINDS:
        raise InvalidRequest(f"column {name!r}: unknown kind {type.kind!r}", hint=nearest(type.kind, _KINDS))
    if type.unsigned and type.kind not in _WHOLE:
        raise InvalidRequest(f"column {name!r}: {type.kind} cannot be unsigned", hint="Use i64 or u64.")
    for field in ("max", "precision", "scale"):
        if getattr(type, field) is not None:
            raise NotSupported(
                f"column {name!r}: `{field}` is not supported",
                hint="Omit it: texts have no length limit, and decimals keep all digits.",
            )
    for field, served in (("charset", _CHARSETS), ("collation", _COLLATIONS)):
        wanted = getattr(type, field)
        if wanted is not None and wanted.lower() not in served:
            raise NotSupported(f"column {name!r}: {field} {wanted!r} is not supported", hint=f"Use {served[0]}.")
