"""Rows and changes of one table as Arrow record batches, and batches as the bytes of an IPC stream.

Columns are typed by their kind. If a value does not fit (SQLite allows any value in a column) or is not known, the
typed column is null and `_misfit` has a JSON object from column name to `Lit`; it is null for all other rows. The
model of an embedding is omitted. Headwater's own columns begin with `_`, or with more underscores if the table has a
column of that name. `columns` selects these columns and the key, in table order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from uuid import UUID

import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.literal import (
    U64,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Value,
    decimal_text,
    is_broken_text,
    to_lit,
    to_plain,
)
from headwater.model.table import Column, Row, Table

if TYPE_CHECKING:
    import pyarrow as pa

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # a message of length 0, as the IPC format defines

Delivered = tuple[Transaction, int, Change, Op]  # a change, its part and offset, and the op it is delivered as

_MISFIT = object()
_json = msgspec.json.Encoder().encode


@runtime_checkable
class Columnar(Protocol):
    """Rows stored column by column."""

    def column(self, place: int) -> pa.Array | Sequence[Value]:
        """Return the column at index `place`, as an Arrow array of its kind's type or as a sequence of values."""


def release_unused() -> None:
    """Give unused memory that Arrow keeps for later batches of this thread back to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def schema(table: Table, columns: Collection[str] | None = None) -> pa.Schema:
    """Return the schema of rows of `table`; each field's metadata has its kind and declared type."""
    return _schema(table, _fields(table, shown_places(table, columns)))


def changes_schema(table: Table, columns: Collection[str] | None = None) -> pa.Schema:
    """Return the schema of changes of `table`: the columns of rows, then those of `about_fields`."""
    return _schema(table, [*_fields(table, shown_places(table, columns)), *about_fields(table)])


def about_fields(table: Table | None = None) -> list[pa.Field]:
    """Return the fields that describe a change: type, version, time, offset, transaction."""
    import pyarrow as pa

    about = {
        "_change_type": pa.string(),  # insert, update_preimage, update_postimage, delete
        "_commit_version": pa.int64(),
        "_commit_timestamp": pa.timestamp("ms", tz="UTC"),
        "_offset": pa.int64(),
        "_txn": pa.string(),
    }
    return [pa.field(name if table is None else free_name(table, name), kind) for name, kind in about.items()]


def shown_places(table: Table, columns: Collection[str] | None) -> list[int]:
    """Return the indexes of the named columns and the key in a row; of all columns if `columns` is None."""
    if columns is None:
        return list(range(len(table.columns)))
    return [place for place, name in enumerate(table.names) if name in columns or name in table.key]


def rows_batch(table: Table, rows: Sequence[Row], columns: Collection[str] | None = None) -> pa.RecordBatch:
    """Return `rows` as one batch of `schema(table, columns)`."""
    import pyarrow as pa

    return pa.record_batch(_columns(table, rows, shown_places(table, columns)), schema=schema(table, columns))


def changes_batch(table: Table, changes: Iterable[Delivered]) -> pa.RecordBatch:
    """Return row changes, all with the columns of `table`, as one batch of `changes_schema(table)`.

    An update is two rows. `_commit_version` is the last offset of the transaction, or the change's own offset if the
    part does not include the end of its transaction.
    """
    images = Images()
    for part, offset, change, op in changes:
        for word, row in _images(change, op):
            images.add(row, word, part.upto if part.last else offset, offset, part)
    return images_batch(table, images)


class Images:
    """Before and after images of changes; entry i of every other list describes row i."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.words: list[str] = []
        self.versions: list[int] = []
        self.stamps: list[int] = []
        self.offsets: list[int] = []
        self.transactions: list[str] = []

    def add(self, row: Row, word: str, version: int, offset: int, part: Transaction) -> None:
        """Add the image `row` of the change at `offset` in `part`; `word` is its `_change_type`."""
        self.rows.append(row)
        self.words.append(word)
        self.versions.append(version)
        self.stamps.append(part.commit_ts_ms or ts_ms(part.ts))
        self.offsets.append(offset)
        self.transactions.append(part.id)

    def taken(self) -> Images:
        """Move all images to a new object and return it: a generator must not keep rows that its reader holds."""
        taken = Images()
        taken.__dict__, self.__dict__ = self.__dict__, taken.__dict__
        return taken

    @property
    def about(self) -> tuple[list[Any], ...]:
        """Return the lists other than `rows`, in the order of `about_fields`."""
        return self.words, self.versions, self.stamps, self.offsets, self.transactions

    def narrow(self, keep: Sequence[bool]) -> None:
        """Remove the rows for which `keep` is False."""
        for values in (self.rows, *self.about):
            values[:] = list(compress(values, keep))


def images_batch(table: Table, images: Images, columns: Collection[str] | None = None) -> pa.RecordBatch:
    """Return `images` as one batch of `changes_schema(table, columns)`."""
    import pyarrow as pa

    found = _columns(table, images.rows, shown_places(table, columns))
    return pa.record_batch([*found, *about_columns(images)], schema=changes_schema(table, columns))


def about_columns(images: Images) -> list[pa.Array]:
    """Return the values that describe `images` as Arrow arrays, one for each of `about_fields`."""
    import pyarrow as pa

    return [pa.array(values, field.type) for values, field in zip(images.about, about_fields(), strict=True)]


class ArrowStream:
    """The bytes of an IPC stream in pieces: `start`, any number of `batch`, `end`.

    `compression` (lz4) is the buffer compression of the IPC format.
    """

    def __init__(self, schema: pa.Schema, compression: str | None = None) -> None:
        import pyarrow as pa

        self.schema = schema
        self._options = pa.ipc.IpcWriteOptions(compression=compression)
        self._start: bytes = schema.serialize().to_pybytes()

    def start(self) -> bytes:
        """Return the first bytes: the schema."""
        return self._start

    def batch(self, batch: pa.RecordBatch, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of one batch with its metadata."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema, options=self._options) as stream:
            stream.write_batch(batch, custom_metadata=None if metadata is None else dict(metadata))
        return bytes(memoryview(sink.getvalue())[len(self.start()) : -len(END_OF_STREAM)])

    def end(self) -> bytes:
        """Return the last bytes, which mark the stream as complete."""
        return END_OF_STREAM


def _images(change: Change, op: Op) -> list[tuple[str, Row]]:
    words = {
        Op.INSERT: (("insert", change.after),),
        Op.UPDATE: (("update_preimage", change.before), ("update_postimage", change.after)),
        Op.DELETE: (("delete", change.before),),
    }
    return [(word, row) for word, row in words.get(op, ()) if row is not None]


# Columns


def _schema(table: Table, fields: list[pa.Field]) -> pa.Schema:
    import pyarrow as pa

    about = {
        "table": table.name,
        "version": str(table.version),
        "key": _json([*map(clean, table.primary_key)]).decode(),
        # The Arrow names of the columns that identify a row, also if the user declared no key.
        "identity": _json([column_name(table, table.columns[place]) for place in table.key_places]).decode(),
    }
    return pa.schema(fields, metadata={name: clean(text) for name, text in about.items()})


def _fields(table: Table, places: list[int]) -> list[pa.Field]:
    import pyarrow as pa

    shown = [table.columns[place] for place in places]
    fields = [_field(column_name(table, column), column) for column in shown]
    return [*fields, pa.field(free_name(table, "_misfit"), pa.string())]


def _field(name: str, column: Column) -> pa.Field:
    import pyarrow as pa

    metadata = {"kind": column.kind, "declared": clean(column.declared)}
    return pa.field(name, _TYPES[column.kind](pa), metadata=metadata | ({"hidden": "true"} if column.hidden else {}))


def column_name(table: Table, column: Column) -> str:
    """Return the Arrow name of a column; a hidden row identity gets a free name such as `_rowid`."""
    return free_name(table, "_" + column.name.strip("_")) if column.hidden else clean(column.name)


def free_name(table: Table, name: str) -> str:
    """Return `name` with leading underscores added until no column of the table has it."""
    taken = {column.name.lower() for column in table.visible}
    while name.lower() in taken:
        name = "_" + name
    return name


def clean(text: str) -> str:
    """Return `text` with lone surrogates as backslash escapes: names in the database need not be valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _columns(table: Table, rows: Sequence[Row], places: list[int]) -> list[pa.Array]:
    import pyarrow as pa

    misfits: dict[int, dict[str, Any]] = {}
    column_at = rows.column if isinstance(rows, Columnar) else _transposed(table, rows).__getitem__
    arrays = []
    for place in places:
        column, values = table.columns[place], column_at(place)
        array = values if isinstance(values, pa.Array) else _fitting(column.kind, values)
        arrays.append(_fitted(column.kind, values, column_name(table, column), misfits) if array is None else array)
    if not misfits:
        return [*arrays, pa.nulls(len(rows), pa.string())]
    texts = [_json(misfits[at]).decode() if at in misfits else None for at in range(len(rows))]
    return [*arrays, pa.array(texts, pa.string())]


def _transposed(table: Table, rows: Sequence[Row]) -> Sequence[Sequence[Value]]:
    return list(zip(*rows, strict=True)) if rows else [()] * len(table.columns)


def _fitting(kind: str, values: Sequence[Value]) -> pa.Array | None:
    """Return the column if all values have the type of its kind or are None, so that none is converted; else None."""
    import pyarrow as pa

    types = set(map(type, values))
    types.discard(type(None))
    if not types:
        return pa.nulls(len(values), _TYPES[kind](pa))
    if types != {_DIRECT.get(kind)}:
        return None
    try:
        return pa.array(values, _TYPES[kind](pa))
    except UnicodeEncodeError:
        return None  # text that is not UTF-8


def _fitted(kind: str, values: Sequence[Value], name: str, misfits: dict[int, dict[str, Any]]) -> pa.Array:
    """Return the column, converted value by value; add values that do not fit to `misfits`."""
    import pyarrow as pa

    fitted = list(map(_FITS[kind], values))
    if _MISFIT in fitted:
        for at, value in enumerate(fitted):
            if value is _MISFIT:
                fitted[at] = None
                misfits.setdefault(at, {})[name] = to_lit(values[at])
    return pa.array(fitted, _TYPES[kind](pa))


# Kinds

Fit = Callable[[Value], Any]  # returns the value for Arrow, None for None, or _MISFIT


def _only(wanted: type, write: Callable[[Any], Any], value: Value) -> Any:
    if type(value) is wanted:
        return write(value)
    return None if value is None else _MISFIT


def _any(value: Value) -> Any:
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return _MISFIT  # its plain form is null
    try:
        return _json(to_plain(value)).decode()
    except KeyError:
        return _MISFIT  # a value that is not known has no plain form


_FITS: dict[str, Fit] = {
    "bool": partial(_only, bool, lambda value: value),
    "i64": partial(_only, int, lambda value: value),
    "u64": partial(_only, U64, lambda value: value.v),
    "f64": partial(_only, float, lambda value: value),
    "str": partial(_only, str, lambda value: _MISFIT if is_broken_text(value) else value),
    "bytes": partial(_only, bytes, lambda value: value),
    "dec": partial(_only, Decimal, decimal_text),
    "json": partial(_only, Json, lambda value: value.text),
    "date": partial(_only, Date, attrgetter("iso")),
    "time": partial(_only, Time, attrgetter("iso")),
    "datetime": partial(_only, DateTime, attrgetter("iso")),
    "uuid": partial(_only, UUID, str),
    "embedding": partial(_only, Embedding, lambda value: list(value.values)),
    "any": _any,
}
_DIRECT: dict[str, type] = {"bool": bool, "i64": int, "f64": float, "str": str, "bytes": bytes}
# Decimals, dates and times are text, which is exact: SQLite has no fixed scale and does not validate dates.
_TYPES: dict[str, Callable[[Any], Any]] = dict.fromkeys(_FITS, lambda pa: pa.string()) | {
    "bool": lambda pa: pa.bool_(),
    "i64": lambda pa: pa.int64(),
    "u64": lambda pa: pa.uint64(),
    "f64": lambda pa: pa.float64(),
    "bytes": lambda pa: pa.binary(),
    "embedding": lambda pa: pa.list_(pa.float32()),
}
