"""Column types of PostgreSQL, MySQL/MariaDB and SQLite, and the values that each database cannot hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from headwater.errors import SinkUnfit
from headwater.model.arrow import changes_schema, schema
from headwater.model.table import Table
from headwater.pipeline.sinks.sink import HISTORY

if TYPE_CHECKING:
    import pyarrow as pa

POSTGRES, MYSQL, SQLITE = "postgresql", "mysql", "sqlite"
TIMESTAMP, WORD, MISFIT = "timestamp", "word", "misfit"  # kinds of our own columns; a word is short text for keys

IN_KEY = "is part of the key"

_NAME_LIMIT = {POSTGRES: ("bytes", 63), MYSQL: ("characters", 64)}
_WORD_LENGTH = 32
_MYSQL_KEY_BYTES = 3072
_MYSQL_KEY_PART = {"bool": 1, TIMESTAMP: 8, "u64": 10, WORD: 4 * _WORD_LENGTH}
_TYPED = {"bool", "i64", "u64", "f64", "bytes", TIMESTAMP, WORD}  # all other kinds are text


class Field(NamedTuple):
    """A column of the target; the column of the frame has the same name."""

    name: str
    kind: str
    is_key: bool = False


def fields_of(table: Table, mode: str) -> list[Field]:
    """Return the columns of the target: those of rows and, for a history, the five columns that describe a change."""
    rows = schema(table)
    identity = {table.index[name] for name in table.key}
    kinds = [column.kind for column in table.columns]
    fields = [Field(rows.field(place).name, kind, place in identity) for place, kind in enumerate(kinds)]
    fields.append(Field(rows.names[-1], MISFIT))
    if mode != HISTORY:
        return fields
    kind_of = {"_change_type": WORD, "_commit_timestamp": TIMESTAMP, "_txn": "str"}
    for name in changes_schema(table).names[len(fields) :]:
        plain = "_" + name.lstrip("_")
        fields.append(Field(name, kind_of.get(plain, "i64"), plain in ("_change_type", "_offset")))
    return fields


class Dialect(NamedTuple):
    """The types and limits of one database. `collation` (MySQL only) compares text by its bytes, blanks included."""

    backend: str
    collation: str = ""

    @classmethod
    def of(cls, engine: sa.Engine) -> Dialect:
        """Return the dialect of an engine; connect to a MySQL server to learn whether it is MariaDB."""
        if engine.dialect.name != MYSQL:
            return cls(engine.dialect.name)
        with engine.connect() as connection:
            is_mariadb = getattr(connection.dialect, "is_mariadb", False)
        return cls(MYSQL, "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise SinkUnfit for a name that the database would truncate or reject."""
        unit, limit = _NAME_LIMIT.get(self.backend, ("", 0))
        for name in names:
            length = len(name.encode()) if unit == "bytes" else len(name)
            if limit and length > limit:
                raise SinkUnfit(
                    f"{self.backend} takes names of at most {limit} {unit}, and {name!r} has {length}",
                    hint="Leave the column out (`columns`), or write to another sink.",
                )

    def column(self, field: Field, name: str, fields: Sequence[Field]) -> sa.Column[Any]:
        """Return the column of `field` under `name`, in a table that has `fields`."""
        width = self.key_width(fields) if field.is_key else None
        kind: Any = sa.Column(name, self._type(field.kind, width), nullable=not field.is_key, quote=True)
        return kind  # type: ignore[no-any-return]

    def _type(self, kind: str, width: int | None) -> Any:
        if self.backend == MYSQL and (kind not in _TYPED or kind == WORD):
            length = _WORD_LENGTH if kind == WORD else width
            wide = mysql.VARCHAR(length, collation=self.collation) if length else None
            return wide or mysql.LONGTEXT(collation=self.collation)
        if self.backend == MYSQL and kind in _MYSQL_TYPES:
            return _MYSQL_TYPES[kind](width)
        if self.backend == SQLITE and kind == "u64":
            return sa.Text()  # SQLite would turn a number beyond 64 signed bits into a float
        return _TYPES.get(kind, sa.Text())

    def key_width(self, fields: Sequence[Field]) -> int | None:
        """Return how many characters (text) or bytes (blob) a key value may have; None if there is no limit."""
        keys = [field for field in fields if field.is_key]
        wide = sum(field.kind == "bytes" or field.kind not in _TYPED for field in keys)
        if self.backend != MYSQL or not wide:
            return None
        taken = sum(_MYSQL_KEY_PART.get(field.kind, 8) for field in keys) - 8 * wide
        return (_MYSQL_KEY_BYTES - taken) // wide // 4

    def unfit(self, batch: pa.RecordBatch, fields: Sequence[Field], width: int | None) -> str | None:
        """Return why the database cannot hold rows of `batch`, which has the columns `fields`; None if it can."""
        for place, field in enumerate(fields):
            why = self._unfit_values(batch.column(place), field, width)
            if why:
                return f"column {field.name!r} {why}"
        return None

    def _unfit_values(self, values: pa.Array, field: Field, width: int | None) -> str | None:
        import pyarrow.compute as pc

        if field.is_key and values.null_count:
            return f"{IN_KEY} and null in a row, or holds a value that is not of its type"
        is_text = field.kind not in _TYPED and field.kind != "embedding"
        if is_text and self.backend == POSTGRES and pc.any(pc.match_substring(values, "\0")).as_py():
            return "holds text with a NUL character, which PostgreSQL cannot keep"
        if field.is_key and field.kind == "f64" and self.backend != POSTGRES and not _all(pc.is_finite(values)):
            return f"{IN_KEY} and holds a number that is not finite"
        if field.is_key and width and (is_text or field.kind == "bytes"):
            measured = pc.utf8_length(values) if is_text else pc.binary_length(values)
            if len(values) and pc.max(measured).as_py() > width:
                return f"{IN_KEY} and longer than the {width} that fit into a key of MySQL"
        return None

    def to_database(self, values: pa.Array, field: Field) -> list[Any]:
        """Return the values in the types that the database driver accepts."""
        write = _WRITE.get((self.backend, field.kind)) or _WRITE.get(("", field.kind))
        plain: list[Any] = values.to_pylist()
        return [None if value is None else write(value) for value in plain] if write else plain

    def from_database(self, values: Sequence[Any], field: Field) -> Sequence[Any]:
        """Return values read from the database in the types that Arrow accepts."""
        read = _READ.get(field.kind)
        return [None if value is None else read(value) for value in values] if read else values


def _all(found: pa.Array) -> bool:
    import pyarrow.compute as pc

    return pc.all(found).as_py() is not False


_TYPES: dict[str, Any] = {
    "bool": sa.Boolean(),
    "i64": sa.BigInteger(),
    "u64": sa.Numeric(20, 0),
    "f64": sa.Double(),
    "bytes": sa.LargeBinary(),
    TIMESTAMP: sa.DateTime(timezone=True),
    WORD: sa.String(_WORD_LENGTH),
}
_MYSQL_TYPES: dict[str, Callable[[int | None], Any]] = {
    "bytes": lambda width: mysql.VARBINARY(width) if width else mysql.LONGBLOB(),
    "f64": lambda width: mysql.DOUBLE(asdecimal=False),
    TIMESTAMP: lambda width: mysql.DATETIME(fsp=6),
}


def _naive(value: Any) -> Any:
    """Return the time in UTC without a time zone: the time types of MySQL and SQLite have none."""
    return value.astimezone(UTC).replace(tzinfo=None)


_WRITE: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("", "embedding"): json.dumps,
    (SQLITE, "u64"): str,
    (SQLITE, TIMESTAMP): lambda value: _naive(value).isoformat(" ", "microseconds"),
    (MYSQL, TIMESTAMP): _naive,
}
_READ: dict[str, Callable[[Any], Any]] = {"embedding": json.loads, "u64": Decimal}
