"""The interface of a log: the durable, ordered, retained changes of one database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import msgspec

from headwater.model.change import Transaction


class Retention(msgspec.Struct, frozen=True):
    """Limits of a log, of which the strictest wins; None means no limit."""

    changes: int | None = 1_000_000
    bytes: int | None = None
    age_ms: int | None = None


class BlockInfo(msgspec.Struct, frozen=True, gc=False):
    """Offsets and size of a block, for retention."""

    first: int
    count: int
    bytes: int
    raw: int
    commit_ms_last: int

    @property
    def upto(self) -> int:
        """Return the offset of the block's last change."""
        return self.first + self.count - 1


class Log(Protocol):
    """Appends whole transactions, reads changes from any offset, evicts the oldest.

    One writer at a time (the capture thread); readers from any thread, also in other processes for the
    disk log. Offsets are 1, 2, 3 … without holes inside a generation and never go back, not even across
    generations. Once `append` returns, its changes survive kill -9 and power loss.
    """

    @property
    def generation(self) -> str:
        """Return the name of the unbroken history in this log; offsets compare only within one generation."""

    @property
    def generation_reason(self) -> str:
        """Return why this generation began: "created", or the `reason` given to `restart`."""

    @property
    def generation_first(self) -> int:
        """Return the first offset of this generation."""

    @property
    def horizon(self) -> int:
        """Return the first offset still retained; `latest + 1` if there is none."""

    @property
    def latest(self) -> int:
        """Return the newest offset; `horizon - 1` if there is none."""

    @property
    def position(self) -> str:
        """Return the source's position of the newest transaction; "" before the first."""

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        """Make `parts` and `notes` durable in one transaction, and return the new `latest`.

        They continue at `latest + 1`, times never go back and no part is empty (InvalidRequest otherwise,
        and nothing is kept). The iterable is consumed as it comes: a transaction of a million rows is never
        in memory as a whole. A part with `last` False must be followed by the rest of its transaction in
        the same call. The iterable itself must not write to the log.
        """

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        """Return the changes in (after, upto], at most `limit` of them, as transactions or parts of them.

        Without a limit, up to the end of a block: a reader that continues there decodes nothing twice.

        Raises OffsetExpired when `after + 1` is before the horizon. Empty at the head and only there;
        fewer than `limit` when rows are very large.
        """

    def scan(self, *, after: int, upto: int | None = None, table: str | None = None) -> Iterator[Transaction]:
        """Yield every change in (after, upto], block by block, as transactions or parts; later appends do not matter.

        `upto` is the `latest` of the call if not given. With `table`, blocks without a change of it may be left out.
        Raises OffsetExpired at once, or on the way when retention overtakes it.
        """

    def offset_at(self, ts: int) -> int:
        """Return the last offset with a hybrid time at or below `ts`, at least `horizon - 1`."""

    def first_whole(self, offset: int) -> int:
        """Return the first retained offset at or above `offset` where a transaction begins, else `latest + 1`."""

    def last_of(self, table: str) -> int:
        """Return the offset of the last change of `table`; 0 if it never changed.

        After that change is evicted, return an upper bound below the horizon.
        """

    def reach(self, after: int, *, changes: int, bytes: int, table: str | None = None) -> int:
        """Return the last offset of a step after `after`: about `changes` changes or `bytes` bytes, at least a change.

        With `table`, only its own changes count. The step ends with a transaction, unless that more than doubles it; at
        the head, return `after`.
        """

    @property
    def clock_ceiling(self) -> int:
        """Return a hybrid time at or above every one ever assigned, from which the clock continues after a crash."""

    def raise_ceiling(self, ts: int) -> None:
        """Record durably that times up to `ts` may be assigned from now on; a lower `ts` has no effect."""

    def note(self, name: str) -> str:
        """Return a small durable text stored with the blocks (the source's nonce, its identity); "" if unset."""

    def set_notes(self, **notes: str) -> None:
        """Store `notes` durably, in one transaction."""

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """Begin a new generation whose first offset will be `first` (> latest); drop the old blocks.

        Return its name: `name`, or a random one if that is empty. `reason` is kept for status pages.
        """

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        """Trim one bounded step towards `retention`; return how many changes the deleted blocks had, 0 when done.

        The horizon moves at once and exactly for the count, by whole blocks for bytes and age. It never
        goes back, also not when a later `retention` keeps more, and never past `hold`, the first offset that must stay
        (for a lease).
        """

    def blocks(self) -> list[BlockInfo]:
        """Return the sizes of the stored blocks, the oldest first."""

    def overdue(self, after: int) -> int:
        """Return the bytes of blocks after offset `after` that the last `retain` kept only because of `hold`."""

    def merge(self) -> int:
        """Join one bounded run of small blocks; return by how many the blocks became fewer, 0 when done."""

    def close(self) -> None:
        """Close the log; everything that was appended is durable already."""
