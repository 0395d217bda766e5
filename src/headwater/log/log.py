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
    """Place and size of a block, for retention."""

    first: int
    count: int
    bytes: int
    raw: int
    commit_ms_last: int

    @property
    def upto(self) -> int:
        """Offset of its last change."""
        return self.first + self.count - 1


class Log(Protocol):
    """Appends whole transactions, reads any stretch of them, forgets the oldest.

    One writer at a time (the capture thread); readers from any thread, also in other processes for the
    disk log. Offsets are 1, 2, 3 … without holes inside a generation and never go back, not even across
    generations. What `append` returned from survives kill -9 and power loss.
    """

    @property
    def generation(self) -> str:
        """Names the unbroken history this log holds. Offsets compare only within one generation."""

    @property
    def generation_reason(self) -> str:
        """Why this generation began: "created", or the `reason` given to `restart`."""

    @property
    def generation_first(self) -> int:
        """The first offset of this generation."""

    @property
    def horizon(self) -> int:
        """The first offset still retained; `latest + 1` when there is none."""

    @property
    def latest(self) -> int:
        """The newest offset; `horizon - 1` when there is none."""

    @property
    def position(self) -> str:
        """The source's position of the newest transaction, "" before the first."""

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        """Make `parts`, and `notes` with them, durable in one step and return the new `latest`.

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

    def scan(self, *, after: int, upto: int | None = None) -> Iterator[Transaction]:
        """Yield every change in (after, upto], block by block; a later append does not disturb it.

        `upto` is the `latest` of the call if not given. Raises OffsetExpired at once, or on the way when
        retention overtakes it.
        """

    def offset_at(self, ts: int) -> int:
        """Return the last offset with a hybrid time at or below `ts`, at least `horizon - 1`."""

    def first_whole(self, offset: int) -> int:
        """Return the first retained offset at or above `offset` where a transaction begins, else `latest + 1`."""

    def reach(self, after: int, *, changes: int, bytes: int) -> int:
        """Return the end of a step after `after` of about so many changes and bytes, at least one change.

        At the end of a transaction, unless one is much larger than a step; `after` at the head.
        """

    @property
    def clock_ceiling(self) -> int:
        """A hybrid time above every one ever given out: the start of the clock after a crash."""

    def raise_ceiling(self, ts: int) -> None:
        """Promise, durably, that times up to `ts` may be given out from now on."""

    def note(self, name: str) -> str:
        """Return a small durable text stored with the blocks (the source's nonce, its identity); "" if unset."""

    def set_notes(self, **notes: str) -> None:
        """Keep `notes` durably, all in one step."""

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """Begin a new generation whose first offset will be `first` (> latest); drop the old blocks.

        Returns its name: that one, or a new one. `reason` is kept for status pages.
        """

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        """Take one bounded step towards `retention`; returns how many changes' space it freed, 0 when done.

        The horizon moves at once and exactly for the count, by whole blocks for bytes and age. It never
        goes back, also not when a later `retention` keeps more, and never past `hold`, the first offset that must stay
        (for a lease).
        """

    def blocks(self) -> list[BlockInfo]:
        """Return the blocks that are kept, the oldest first."""

    def overdue(self, after: int) -> int:
        """Return the bytes of blocks after offset `after` that the last `retain` would drop without `hold`."""

    def merge(self) -> int:
        """Join one bounded run of small blocks; returns how many blocks went away."""

    def close(self) -> None:
        """Release files. Nothing is lost: there is nothing left to write."""
