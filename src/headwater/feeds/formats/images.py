"""Writers of row images and keys, compiled per version of a table: columns as an object, the key as a list."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from headwater.feeds.formats.values import Form, clean, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Unavailable, Value
from headwater.model.table import Row, Table

INSERT, DELETE = Op.INSERT, Op.DELETE  # a lookup of an enum member costs as much as writing a value
Unknown = set[str]  # names of columns that an image lacks, because the source did not send them (unchanged TOAST)


def delivered_images(change: Change, op: Op) -> tuple[Row | None, Row | None]:
    """Return the before and after images that are delivered with `op`."""
    return (None if op is INSERT else change.before, None if op is DELETE else change.after)


def image_columns(table: Table, shape: Shape) -> list[str]:
    """Return the columns of images, in the order in which they are written."""
    names = [column.name for column in table.visible if not shape.columns or column.name in shape.columns]
    return sorted(names, key=clean)


def unavailable(unknown: Unknown) -> bytes:
    """Return the field that lists the columns in `unknown`; b"" if there are none."""
    return b',"unavailable":' + encode(sorted(unknown)) if unknown else b""


class Image:
    """Writes the columns `names` of a row as an object."""

    def __init__(self, table: Table, names: Sequence[str], form: Form) -> None:
        self._names = names
        self._fields = [name(column) + b":" for column in names]
        self._form = form
        self._values = _values([table.index[column] for column in names])
        self._whole = b"{" + b",".join(field.replace(b"%", b"%%") + b"%b" for field in self._fields) + b"}"

    def __call__(self, row: Row, unknown: Unknown) -> bytes:
        """Return the object. Unavailable columns are left out and added to `unknown` if `form` cannot write them."""
        form = self._form
        try:
            return self._whole % tuple([form[type(value)](value) for value in self._values(row)])
        except KeyError:
            return self._partial(row, unknown)

    def _partial(self, row: Row, unknown: Unknown) -> bytes:
        found = []
        for column, field, value in zip(self._names, self._fields, self._values(row), strict=True):
            if value is UNAVAILABLE:
                unknown.add(clean(column))
            else:
                found.append(field + self._form[type(value)](value))
        return b"{" + b",".join(found) + b"}"


class Key:
    """Writes the key of a row: as a list, or as an object where its columns are `named`."""

    def __init__(self, table: Table, form: Form, *, named: bool = False) -> None:
        self._form = {Unavailable: lambda value: b"null", **form}
        self._key_of = table.key_of
        fields = [name(column).replace(b"%", b"%%") + b":%b" if named else b"%b" for column in table.key]
        self._whole = (b"{%b}" if named else b"[%b]") % b",".join(fields)
        self._place = table.key_places[0] if len(table.key) == 1 else None

    def __call__(self, row: Row) -> bytes:
        """Return the key of `row`."""
        form = self._form
        if self._place is not None:  # most keys have one column, and this takes half the time
            value = row[self._place]
            return self._whole % form[type(value)](value)
        return self.write(self._key_of(row))

    def write(self, key: Sequence[Value]) -> bytes:
        """Return a key that is not part of a row."""
        return self._whole % tuple([self._form[type(value)](value) for value in key])

    def moved(self, before: Row | None, now: bytes) -> bytes:
        """Return the old key of an update if it is available and differs from `now`; else b""."""
        if before is None or (old := self(before)) == now or UNAVAILABLE in self._key_of(before):
            return b""
        return old


def identity_of(table: Table, form: Form) -> Key | None:
    """Return the writer of the row identity for a table without a primary key; None if it has one."""
    return Key(table, form, named=True) if table.key and not table.primary_key else None


def identity(key: Key, before: Row | None, row: Row) -> bytes:
    """Return the fields with the current and the previous identity of a row."""
    now = key(row)
    moved = key.moved(before, now)
    return b',"identity":' + now + (b',"identity_before":' + moved if moved else b"")


def _values(places: Sequence[int]) -> Callable[[Row], Row]:
    if len(places) == 1:
        (place,) = places
        return lambda row: (row[place],)
    return operator.itemgetter(*places) if places else lambda row: ()
