"""Subscription: what is known of one subscriber, and how far its first snapshot has come."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from headwater.errors import InvalidRequest
from headwater.feeds.options import Options
from headwater.model.row_msgpack import decode_row, encode_row
from headwater.model.table import Key

END = b""  # the end of a table: behind every key


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Keys of `table` from the end of the stretch before it up to and with `end`, as they were at `offset`."""

    table: str
    end: bytes  # a key as `Source.order` writes it, or END
    offset: int


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot being read: where it goes on, and at which offset every stretch so far was read.

    Within a run it only grows. A run that cannot go on is begun anew, under the next number.
    """

    tables: tuple[str, ...]
    table: int = 0  # place in `tables` of the one being read
    after: bytes | None = None  # its last key read, packed: a Lit would not tell broken text from bytes
    chunks: tuple[Stretch, ...] = ()  # neighbours with one offset are joined
    forms: dict[str, tuple[str, ...]] = {}  # by table: its version and order when its rows were read
    done: bool = False
    run: int = 1
    generation: str = ""  # of the log whose offsets these are; "" before the first chunk
    held: int = 0  # changes after this offset are held by the lease
    lease_started_ms: int = 0
    confirmed: str = ""  # the place that its client has acked
    partial: bool = False  # the last page of rows that a poll got was not the last of the snapshot
    told: bool = False  # its client has shown that it has every row: by an ack or an offset
    again: int = 0  # the newest offset at which rows were read that had been read before

    @property
    def lowest(self) -> int:
        """Changes are read from here on."""
        return min((stretch.offset for stretch in self.chunks), default=self.held)

    @property
    def after_key(self) -> Key | None:
        """The key that the next chunk follows."""
        return None if self.after is None else decode_row(self.after)

    def read(self, *, offset: int, end: bytes, next_key: Key | None) -> SnapshotState:
        """The state after one more chunk of the current table, up to `end`; without `next_key` its last."""
        name = self.tables[self.table]
        ends_table = next_key is None
        return replace(
            self,
            table=self.table + ends_table,
            after=None if next_key is None else encode_row(next_key),
            chunks=_joined(self.chunks, Stretch(name, END if ends_table else end, offset)),
            done=ends_table and self.table + 1 == len(self.tables),
        )

    def restarted(self, now_ms: int) -> SnapshotState:
        """The same snapshot from its beginning: cursors of the run before are recognised as such."""
        return SnapshotState(tables=self.tables, run=self.run + 1, lease_started_ms=now_ms)


def _joined(chunks: tuple[Stretch, ...], new: Stretch) -> tuple[Stretch, ...]:
    if chunks and (chunks[-1].table, chunks[-1].offset) == (new.table, new.offset):
        return (*chunks[:-1], new)
    return (*chunks, new)


class Subscription(msgspec.Struct, kw_only=True, eq=False):
    """One subscription as it is now. Only its registry changes it; anybody may read it, from any thread."""

    id: str
    owner: str  # name of the principal that made it
    options: Options
    created_ms: int
    acked: int  # what its client has dealt with
    quiet: int = 0  # nothing after `acked` up to here concerns it
    name: str | None = None
    paused: bool = False
    snapshot: SnapshotState | None = None  # None: it began without one, or that is over

    @property
    def db(self) -> str:
        """The database it listens to."""
        return self.options.db

    @property
    def cursor(self) -> int:
        """Where it goes on."""
        return max(self.acked, self.quiet)

    def resume(self, asked: int) -> int:
        """Where a reader that asks for `asked` goes on: what was acked is not repeated, the quiet not read again."""
        at = max(asked, self.acked)
        return max(at, self.quiet) if at <= self.quiet else at


def check_has_rows(state: SnapshotState, offset: int) -> None:
    """InvalidRequest for a poll from `offset` by a client that has a part of the rows: it would miss the others."""
    is_within = bool(state.chunks) and (not state.done or state.partial)
    if is_within and not state.told and offset >= state.lowest:
        raise InvalidRequest(
            "the snapshot is not at its end, so `from_offset` would skip rows",
            hint="Send `snapshot.cursor` of the last page as `cursor`, until `snapshot.done` is true.",
        )


def owes_rows(state: SnapshotState, place: str | None, offset: int | None) -> bool:
    """Whether a reader gets rows first: until it names an offset, or has acked, nobody knows that it has them."""
    behind = offset is None or offset < state.lowest  # a place before the rows says nothing about them
    return not state.done or bool(place) or (behind and not state.told)
