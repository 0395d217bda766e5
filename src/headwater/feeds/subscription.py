"""The state of one subscription and the progress of its initial snapshot."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from headwater.errors import InvalidRequest
from headwater.feeds.options import Options
from headwater.model.row_msgpack import decode_row, encode_row
from headwater.model.table import Key

END = b""  # the end of a table, after every key


class SnapshotSpan(msgspec.Struct, frozen=True, array_like=True):
    """The keys of `table` after the previous stretch up to `end` (inclusive), whose rows were read at `offset`."""

    table: str
    end: bytes  # a key as `Source.order` writes it, or END
    offset: int


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a snapshot: the next key to read, and the offset at which each stretch was read.

    Within a run the progress only grows. A run that cannot continue is restarted under the next run number.
    """

    tables: tuple[str, ...]
    table: int = 0  # index in `tables` of the table being read
    after: bytes | None = None  # the last key read, packed: a Lit cannot distinguish invalid text from bytes
    chunks: tuple[SnapshotSpan, ...] = ()  # adjacent stretches with the same offset are merged
    forms: dict[str, tuple[str, ...]] = {}  # by table: its version and key order when its rows were read
    done: bool = False
    run: int = 1
    generation: str = ""  # the generation of the log that the offsets belong to; "" before the first chunk
    held: int = 0  # the lease keeps the changes after this offset
    lease_started_ms: int = 0
    confirmed: str = ""  # the snapshot cursor that the client has acknowledged
    partial: bool = False  # the last page of rows that a poll received was not the last page of the snapshot
    # The client has every row, as an ack or an offset that it sent proves. Stored under its older name.
    rows_received: bool = msgspec.field(default=False, name="told")
    again: int = 0  # the newest offset at which rows were read a second time

    @property
    def lowest(self) -> int:
        """Return the offset after which changes follow the snapshot."""
        return min((stretch.offset for stretch in self.chunks), default=self.held)

    @property
    def highest(self) -> int:
        """Return the offset after which every change is delivered, because no row that was sent is newer."""
        return max(self.again, max((stretch.offset for stretch in self.chunks), default=self.held))

    @property
    def after_key(self) -> Key | None:
        """Return the key after which the next chunk begins; None at the beginning of a table."""
        return None if self.after is None else decode_row(self.after)

    def read(self, *, offset: int, end: bytes, next_key: Key | None) -> SnapshotState:
        """Return the state after one more chunk of the current table, up to `end`; its last chunk has no `next_key`."""
        name = self.tables[self.table]
        ends_table = next_key is None
        return replace(
            self,
            table=self.table + ends_table,
            after=None if next_key is None else encode_row(next_key),
            chunks=_joined(self.chunks, SnapshotSpan(name, END if ends_table else end, offset)),
            done=ends_table and self.table + 1 == len(self.tables),
        )

    def restarted(self, now_ms: int) -> SnapshotState:
        """Return the same snapshot from its beginning, with a new run number that makes older cursors recognisable."""
        return SnapshotState(tables=self.tables, run=self.run + 1, lease_started_ms=now_ms)


def _joined(chunks: tuple[SnapshotSpan, ...], new: SnapshotSpan) -> tuple[SnapshotSpan, ...]:
    if chunks and (chunks[-1].table, chunks[-1].offset) == (new.table, new.offset):
        return (*chunks[:-1], new)
    return (*chunks, new)


class Subscription(msgspec.Struct, kw_only=True, eq=False):
    """The current state of one subscription. Only the registry changes it; any thread may read it."""

    id: str
    owner: str  # the name of the principal that created the subscription
    options: Options
    created_ms: int
    acked: int  # the newest offset that the client has acknowledged
    quiet: int = 0  # no change after `acked` up to this offset passes the filter
    name: str | None = None
    paused: bool = False
    snapshot: SnapshotState | None = None  # None: no snapshot was requested, or it is complete

    @property
    def db(self) -> str:
        """Return the database of the subscription."""
        return self.options.db

    @property
    def cursor(self) -> int:
        """Return the offset after which delivery continues."""
        return max(self.acked, self.quiet)

    def resume(self, offset: int) -> int:
        """Return the cursor of a reader that requests `offset`: skip acknowledged changes and the quiet stretch."""
        at = max(offset, self.acked)
        return max(at, self.quiet) if at <= self.quiet else at


def check_has_rows(state: SnapshotState, offset: int) -> None:
    """Raise InvalidRequest for a poll from `offset` if the client has only some rows: it would miss the others."""
    is_within = bool(state.chunks) and (not state.done or state.partial)
    if is_within and not state.rows_received and offset >= state.lowest:
        raise InvalidRequest(
            f"the snapshot is not complete, so `from_offset` {offset} would skip rows",
            hint="Send `snapshot.cursor` of the last page as `cursor`, until `snapshot.done` is true.",
        )


def owes_rows(state: SnapshotState, cursor: str | None, offset: int | None) -> bool:
    """Return whether a reader gets rows first: they are sent until the reader names an offset or acknowledges them."""
    behind = offset is None or offset < state.lowest  # such an offset does not prove that the rows were received
    return not state.done or bool(cursor) or (behind and not state.rows_received)
