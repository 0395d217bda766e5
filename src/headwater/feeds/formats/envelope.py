"""The plan of Debezium's envelope for one version of a table, used by the Python and the compiled encoder."""

from __future__ import annotations

from collections.abc import Sequence

from headwater import __version__
from headwater.feeds.formats.images import Image, Key, image_columns
from headwater.feeds.formats.values import PLAIN, Form, name
from headwater.feeds.options import Shape
from headwater.model.change import Transaction
from headwater.model.clock import ts_ms
from headwater.model.literal import Unavailable
from headwater.model.table import Table

FORM = 2  # the version of Plan and Frames: a module that was compiled for another version is not used
_FORM: Form = {**PLAIN, Unavailable: lambda value: b'"__debezium_unavailable_value"'}  # Debezium's own placeholder


class Plan:
    """The parts that all changes of one version of a table have in common."""

    def __init__(self, table: Table, shape: Shape) -> None:
        db = name(shape.db)
        names = image_columns(table, shape)
        self.before, self.after, self.form = shape.before, shape.after, _FORM
        self.columns = fields(table, names)
        self.keys = fields(table, table.key)
        self.image = Image(table, names, _FORM)
        self.key = Key(table, _FORM, named=True)
        source = b'"source":{"version":%b,"connector":"headwater","name":%b,"ts_ms":'
        self.source = source % (name(__version__), db)
        self.db = b'","db":' + db + b',"sequence":"'
        self.table = b'","table":' + name(table.name) + b',"txId":'

    def around(self, part: Transaction) -> tuple[bytes, bytes, bytes]:
        """Return the bytes of all changes of `part` before the first offset, between the two offsets, and from the op
        to the position in the transaction. `sequence` holds the last offset before the transaction and the change's
        own offset."""
        first = b'%d,"snapshot":"false%b[\\"%d\\",\\"' % (part.commit_ts_ms, self.db, part.first - part.start - 1)
        id = name(part.id)
        end = b'","ts_ms":%d,"transaction":{"id":%b,"total_order":' % (ts_ms(part.ts), id)
        return b"," + self.source + first, b'\\"]%b%b,"lsn":' % (self.table, id), end


def fields(table: Table, names: Sequence[str]) -> tuple[tuple[bytes, int], ...]:
    """Return for each field of an object the bytes before its value, and the index of the value in a row."""
    starts = [b"{", *[b","] * (len(names) - 1)] if names else []
    pairs = zip(starts, names, strict=True)
    return tuple((start + name(column) + b":", table.index[column]) for start, column in pairs)
