"""What formats write of a row, compiled per shape of the table: its columns as an object, its key as a list."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from headwater.feeds.formats.values import Form, clean, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Unavailable, Value
from headwater.model.table import Row, Table

INSERT, DELETE = Op.INSERT, Op.DELETE  # a member looked up on its enum costs as much as writing a value
Unknown = set[str]  # names of columns left out of an image, because the source did not send them


def delivered(change: Change, op: Op) -> tuple[Row | None, Row | None]:
    """The before and the after image that go with `op`."""
    return (None if op is INSERT else change.before, None if op is DELETE else change.after)


def shown(table: Table, shape: Shape) -> list[str]:
    """The columns that images hold, in the order they are written."""
    names = [column.name for column in table.visible if not shape.columns or column.name in shape.columns]
    return sorted(names, key=clean)


def unavailable(unknown: Unknown) -> bytes:
    """The field that names what was left out; nothing when nothing was."""
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
        """The object. Columns whose value is not known, and has no form for that, join `unknown`."""
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
        """The key of `row`."""
        form = self._form
        if self._place is not None:  # most keys: half the time of what follows
            value = row[self._place]
            return self._whole % form[type(value)](value)
        return self.write(self._key_of(row))

    def write(self, key: Sequence[Value]) -> bytes:
        """A key that stands alone."""
        return self._whole % tuple([self._form[type(value)](value) for value in key])

    def moved(self, before: Row | None, now: bytes) -> bytes:
        """The key that an update took away, if it is known and not what is written `now`; else nothing."""
        if before is None or (old := self(before)) == now or UNAVAILABLE in self._key_of(before):
            return b""
        return old


def identity_of(table: Table, form: Form) -> Key | None:
    """Writes what stands in place of a key where none is declared."""
    return Key(table, form, named=True) if table.key and not table.primary_key else None


def identity(key: Key, before: Row | None, row: Row) -> bytes:
    """The fields that tell which row it is, and was."""
    now = key(row)
    moved = key.moved(before, now)
    return b',"identity":' + now + (b',"identity_before":' + moved if moved else b"")


def _values(places: Sequence[int]) -> Callable[[Row], Row]:
    if len(places) == 1:
        (place,) = places
        return lambda row: (row[place],)
    return operator.itemgetter(*places) if places else lambda row: ()
