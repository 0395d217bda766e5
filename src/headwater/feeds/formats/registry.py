"""The encoders by the name of their format."""

from __future__ import annotations

from collections.abc import Callable

from headwater.feeds.formats.cloudevents import CloudEvents
from headwater.feeds.formats.cockroach import Cockroach
from headwater.feeds.formats.debezium_encoder import debezium
from headwater.feeds.formats.encoder import Encoder, Frames, Maker, WriteChange, WritesFrames
from headwater.feeds.formats.frame import FrameTemplate
from headwater.feeds.formats.gateway import GATEWAY, Gateway
from headwater.feeds.formats.native import Native
from headwater.feeds.formats.sochdb import EVENT, WATCH, Events, WatchKeyEvents
from headwater.feeds.formats.values import LIT, PLAIN
from headwater.feeds.options import Shape
from headwater.model import formats
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Row, Table
from headwater.model.table_ddl import with_table_ddl
from headwater.sources.read import Readable

MAKERS: dict[str, Maker] = {
    formats.OBJECTS: lambda shape: Native(shape, LIT),
    formats.PLAIN: lambda shape: Native(shape, PLAIN),
    formats.DEBEZIUM: debezium,
    formats.CLOUDEVENTS: CloudEvents,
    formats.COCKROACH: Cockroach,
}


OWN: dict[str, Maker] = {GATEWAY: Gateway}  # the format of a transport that has only one
# These encoders write keys as bytes, in the order of the source.
WITH_KEYS: dict[str, Callable[[Shape, Readable | None], Encoder]] = {EVENT: Events, WATCH: WatchKeyEvents}


def encoder(shape: Shape, source: Readable | None = None) -> Encoder:
    """Return the encoder of `shape`, whose format must be known; `source` provides the order of keys."""
    with_keys = WITH_KEYS.get(shape.format)
    made = (MAKERS | OWN)[shape.format](shape) if with_keys is None else with_keys(shape, source)
    if not shape.hides_ddl:
        return made
    return _HiddenDdlFrames(made) if isinstance(made, WritesFrames) else _HiddenDdl(made)


class _HiddenDdl(Encoder):
    """An encoder for readers that are restricted to tables: no format receives a statement as it was run."""

    def __init__(self, made: Encoder) -> None:
        self._made = made

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        return self._made.change(part, offset, with_table_ddl(change), op)

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        return self._made.row(table, row, offset, read_ms)


class _HiddenDdlFrames(_HiddenDdl, WritesFrames):
    """A `_HiddenDdl` around an encoder that writes many changes at once."""

    def __init__(self, made: WritesFrames) -> None:
        super().__init__(made)
        self._frames = made.frames

    def frames(
        self, enclosing: FrameTemplate, limit: int, most: int, schema_change: WriteChange | None = None
    ) -> Frames:
        return self._frames(enclosing, limit, most, schema_change or self.change)
