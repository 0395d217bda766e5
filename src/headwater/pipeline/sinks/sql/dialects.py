"""Column types of PostgreSQL, MySQL/MariaDB and SQLite, and the values that each database cannot hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from headwater.errors import SinkUnfit
from headwater.model.literal import decimal_text
from headwater.model.table import Table
from headwater.pipeline.sinks.sink import HISTORY
from headwater.pipeline.transform.schema import TEXT, changes_schema, rows_schema

if TYPE_CHECKING:
    import pyarrow as pa

POSTGRES, MYSQL, SQLITE = "postgresql", "mysql", "sqlite"
TIMESTAMP, WORD, MISFIT = "timestamp", "word", "misfit"  # kinds of our own columns; a word is short text for keys
DAY, ZONELESS = "day", "zoneless timestamp"  # kinds of typed columns, as are TIMESTAMP and decimal(digits,scale)

IN_KEY = "is part of the key"

_NAME_LIMIT = {POSTGRES: ("bytes", 63), MYSQL: ("characters", 64)}
_WORD_LENGTH = 32
_MYSQL_KEY_BYTES = 3072
_MYSQL_SCALE = 30
_SQLITE_DIGITS = 15  # SQLite stores a decimal as a float, which keeps this many digits
_MYSQL_KEY_PART = {"bool": 1, TIMESTAMP: 8, "u64": 10, WORD: 4 * _WORD_LENGTH}
# With decimals; all other kinds are text.
_TYPED = {"bool", "i64", "u64", "f64", "bytes", TIMESTAMP, DAY, ZONELESS, WORD}


class Field(NamedTuple):
    """A column of the target; the column of the frame has the same name."""

    name: str
    kind: str
    is_key: bool = False


def fields_of(table: Table, mode: str, types: str = TEXT) -> list[Field]:
    """Return the columns of the target: those of rows and, for a history, the five columns that describe a change."""
    rows = rows_schema(table, types=types)
    identity = {table.index[name] for name in table.key}
    kinds = [column.kind for column in table.columns]
    fields = [_field(rows.field(place), kind, place in identity) for place, kind in enumerate(kinds)]
    fields.append(Field(rows.names[-1], MISFIT))
    if mode != HISTORY:
        return fields
    kind_of = {"_change_type": WORD, "_commit_timestamp": TIMESTAMP, "_txn": "str"}
    for name in changes_schema(table).names[len(fields) :]:
        plain = "_" + name.lstrip("_")
        fields.append(Field(name, kind_of.get(plain, "i64"), plain in ("_change_type", "_offset")))
    return fields


def _field(column: pa.Field, kind: str, is_key: bool) -> Field:
    """Return the column of the target for a column of rows, whose Arrow type says whether it is typed."""
    import pyarrow.types as types

    found = column.type
    if types.is_date(found):
        return Field(column.name, DAY)
    if types.is_timestamp(found):
        return Field(column.name, TIMESTAMP if found.tz else ZONELESS)
    if types.is_decimal(found) and kind != "u64":
        return Field(column.name, f"decimal({found.precision},{found.scale})")
    return Field(column.name, kind, is_key)


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
        kind: Any = sa.Column(name, self._type(field, width), nullable=not field.is_key, quote=True)
        return kind  # type: ignore[no-any-return]

    def _type(self, field: Field, width: int | None) -> Any:
        kind = field.kind
        if self._is_numeric(kind):
            digits, scale = _digits(kind)
            return sa.Numeric(digits, scale, asdecimal=False) if self.backend == SQLITE else sa.Numeric(digits, scale)
        if self.backend == MYSQL and (_is_text(kind) or kind == WORD):
            length = _WORD_LENGTH if kind == WORD else width
            wide = mysql.VARCHAR(length, collation=self.collation) if length else None
            return wide or mysql.LONGTEXT(collation=self.collation)
        if self.backend == MYSQL and kind in _MYSQL_TYPES:
            return _MYSQL_TYPES[kind](width)
        if self.backend == SQLITE and kind == "u64":
            return sa.Text()  # SQLite would turn a number beyond 64 signed bits into a float
        return _TYPES.get(kind, sa.Text())

    def _is_numeric(self, kind: str) -> bool:
        """Return whether the kind is a decimal that the database has an exact type for; other decimals are text."""
        if not _is_decimal(kind):
            return False
        digits, scale = _digits(kind)
        if self.backend == SQLITE:
            return digits <= _SQLITE_DIGITS
        return self.backend != MYSQL or scale <= _MYSQL_SCALE

    def key_width(self, fields: Sequence[Field]) -> int | None:
        """Return how many characters (text) or bytes (blob) a key value may have; None if there is no limit."""
        keys = [field for field in fields if field.is_key]
        wide = sum(field.kind == "bytes" or _is_text(field.kind) for field in keys)
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
        is_text = _is_text(field.kind) and field.kind != "embedding"
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
        if _is_decimal(field.kind) and (self.backend == SQLITE or not self._is_numeric(field.kind)):
            write = decimal_text
        plain: list[Any] = values.to_pylist()
        return [None if value is None else write(value) for value in plain] if write else plain

    def from_database(self, values: Sequence[Any], field: Field) -> Sequence[Any]:
        """Return values read from the database in the types that Arrow accepts."""
        read = _READ.get(field.kind)
        if _is_decimal(field.kind):
            read = partial(_decimal_of, scale=_digits(field.kind)[1])
        return [None if value is None else read(value) for value in values] if read else values


def _is_text(kind: str) -> bool:
    return kind not in _TYPED and not _is_decimal(kind)


def _is_decimal(kind: str) -> bool:
    return kind.startswith("decimal(")


def _digits(kind: str) -> tuple[int, int]:
    """Return the digits and the scale of a kind `decimal(digits,scale)`."""
    digits, _, scale = kind.removeprefix("decimal(").removesuffix(")").partition(",")
    return int(digits), int(scale)


def _decimal_of(value: Any, scale: int) -> Decimal:
    """Return the decimal that the database returned as such, as text, or as the float that SQLite makes of it."""
    return Decimal(f"{value:.{scale}f}" if isinstance(value, float) else value)


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
    ZONELESS: sa.DateTime(),
    DAY: sa.Date(),
    WORD: sa.String(_WORD_LENGTH),
}
_MYSQL_TYPES: dict[str, Callable[[int | None], Any]] = {
    "bytes": lambda width: mysql.VARBINARY(width) if width else mysql.LONGBLOB(),
    "f64": lambda width: mysql.DOUBLE(asdecimal=False),
    **dict.fromkeys((TIMESTAMP, ZONELESS), lambda width: mysql.DATETIME(fsp=6)),
}


def _naive(value: Any) -> Any:
    """Return the time in UTC without a time zone: the time types of MySQL and SQLite have none."""
    return value.astimezone(UTC).replace(tzinfo=None)


_WRITE: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("", "embedding"): json.dumps,
    (SQLITE, "u64"): str,
    (SQLITE, TIMESTAMP): lambda value: _naive(value).isoformat(" ", "microseconds"),
    (SQLITE, ZONELESS): lambda value: value.isoformat(" ", "microseconds"),
    (SQLITE, DAY): lambda value: value.isoformat(),
    (MYSQL, TIMESTAMP): _naive,
}
_READ: dict[str, Callable[[Any], Any]] = {"embedding": json.loads, "u64": Decimal}
