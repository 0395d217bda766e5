"""Reader of the capture table: turns pages of rows into transactions, detects schema changes and lost history.

Each page is one short read transaction, closed before its changes are yielded: a long read keeps the WAL growing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import apsw
import msgspec

from headwater.errors import SourceMismatch
from headwater.model.change import Transaction
from headwater.sources.sqlite.capture.change_decoder import Aside, CaptureRow, Decoder, Numbered, Replaced
from headwater.sources.sqlite.capture.image_chain import ImageChain
from headwater.sources.sqlite.capture.trigger_installation import capture_cells, may_nest, meta, read_layouts
from headwater.sources.sqlite.capture.triggers import CAPTURE, REPLACED, TXN, cells
from headwater.sources.sqlite.connection import OURS, sqlite_errors
from headwater.sources.sqlite.row_fetch import fetch, fetch_about

PAGE = 4096  # rows per read; also the maximum number of changes in one part of a transaction
PAGE_BYTES = 16 << 20  # approximate bytes per read, for large rows


class OwnTransaction(msgspec.Struct, frozen=True):
    """A transaction that our own writer recorded: offsets `first` to `upto`."""

    upto: int
    first: int
    us: int  # commit time in microseconds since 1970


class Page(msgspec.Struct, frozen=True):
    """The capture rows and the state of the file that one read transaction saw."""

    rows: list[CaptureRow]
    replaced: list[Replaced]
    own: list[OwnTransaction]
    head: int
    nonce: str
    schema_version: int


class Follower:
    """Reader of one file's changes, used by the capture thread. `reconcile` and `demand_resnapshot` use the writer.

    `reconcile` adapts capture to the schema and returns the schema version that capture now matches.
    """

    def __init__(
        self,
        db: apsw.Connection,
        *,
        nonces: Callable[[], tuple[str, ...]],
        reconcile: Callable[[int], int],
        demand_resnapshot: Callable[[set[str]], None],
        saw_foreign: Callable[[], None],
    ) -> None:
        self._db = db
        self._nonces = nonces
        self._reconcile, self._demand = reconcile, demand_resnapshot
        self._saw_foreign = saw_foreign
        self._schema_version = -1
        self._decoder = Decoder({})
        self._may_nest = False  # stays true: rows of a dropped trigger may be left to read
        self._cells = 0
        self.known_good = 0  # newest offset read while the schema matched the loaded layouts
        self._nothing_after = (-1, -1)  # SQLite's data_version and the offset when the last read found no more rows
        self._boundary: CaptureRow | None = None  # the newest row read; the file must still hold this row unchanged

    def follow(self, after: int) -> Iterator[Transaction]:
        """Yield the transactions after `after`, up to the head at the time of the call."""
        with sqlite_errors():
            version = _one(self._db, "PRAGMA data_version")
        if (version, after) == self._nothing_after and self._schema_version != -1:
            return  # no commit since the last call, and that call read everything
        for part in self._parts(after):
            yield part
            after = part.upto
        self._nothing_after = (version, after)

    def _parts(self, after: int) -> Iterator[Transaction]:
        head: int | None = None
        is_followed = self._may_nest
        grouping = Grouping(self._saw_foreign)
        chain, demanded = ImageChain(), set[str]()  # a demand follows the head, hence all changes of this call
        aside: Aside = {}  # A replaced row and the insert that replaced it are in one transaction, hence in one call.
        while head is None or after < head:
            page = self._read(after, head)
            if page.schema_version != self._schema_version:
                self._adopt(page, after)
                is_followed = True  # these changes may be of a trigger that was dropped again
                continue
            self._check(page, after)
            head = page.head if head is None else head
            self.known_good = page.rows[-1][0] if page.rows else after
            if not page.rows:
                return
            self._boundary = page.rows[-1]
            after = page.rows[-1][0]
            decoded = self._decoder.page(page.rows, page.replaced, aside)
            changes, broken = chain.page(decoded, is_followed=is_followed and after < head)
            yield from grouping.parts(changes, page.own, head, time.time_ns() // 1_000)
            if broken := (broken | self._decoder.doubtful(page.replaced)) - demanded:
                self._demand(broken)
                demanded |= broken

    def rows(self, after: int, upto: int) -> Iterator[Numbered]:
        """Yield the retained changes in (after, upto] as captured, to compare them with the log."""
        self._load()
        self._schema_version = -1  # forces the next `follow` to reconcile capture with the schema
        while after < upto:
            page = self._read(after, upto)
            if not page.rows:
                return
            yield from self._decoder.page(page.rows, (), {})
            after = page.rows[-1][0]

    def oldest(self) -> int:
        """Return the oldest offset still in the capture table, which is never empty."""
        with sqlite_errors():
            ((oldest,),) = self._db.execute(f"SELECT min(seq) FROM {CAPTURE}").fetchall()
        return int(str(oldest))

    def _read(self, after: int, head: int | None, limit: int = PAGE) -> Page:
        with sqlite_errors(), _our_tables():
            self._db.execute("BEGIN")
            try:
                return self._page(after, head, limit)
            finally:
                if self._db.in_transaction:  # SQLite ends the transaction itself when it runs out of memory
                    self._db.execute("COMMIT")

    def _page(self, after: int, head: int | None, limit: int) -> Page:
        version = _one(self._db, "PRAGMA schema_version")
        top = _one(self._db, f"SELECT coalesce(max(seq), -1) FROM {CAPTURE}")
        nonce = meta(self._db, "nonce")
        if version != self._schema_version and self._cells == 0:
            return Page([], [], [], top, nonce, version)
        upto = top if head is None else head
        columns = f"seq, t, op, {cells(self._cells)}"
        rows = fetch_about(
            self._db.execute,
            f"SELECT {columns} FROM {CAPTURE} WHERE seq >= ? AND seq <= ? ORDER BY seq LIMIT {limit + 1}",
            (after, upto),
            self._cells + 3,
            weight=PAGE_BYTES,
        )
        if rows and rows[0][0] == after:
            self._compare(rows.pop(0))
        rows = rows[:limit]
        last = rows[-1][0] if rows else after
        recorded = self._db.execute(
            f"SELECT upto, first, 1000 * ms + coalesce(us, 0) FROM {TXN} WHERE upto > ? AND first <= ? ORDER BY upto",
            (after, last),
        ).fetchall()
        own = [OwnTransaction(*map(int, map(str, row))) for row in recorded]
        return Page(rows, self._replaced(after, last), own, top, nonce, version)

    def _replaced(self, after: int, last: int) -> list[Replaced]:
        width = self._cells // 2
        rows = fetch(
            self._db.execute,
            f"SELECT head, t, {cells(width)} FROM {REPLACED} WHERE head >= ? AND head < ? ORDER BY id",
            (after, last),
            width + 2,
        )
        return [(row[0], row[1], self._trim_width(row)) for row in rows]

    def _trim_width(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        layout = self._decoder.layouts.get(abs(row[1]))
        return row[2 : 2 + len(layout.table.columns)] if layout else row[2:]

    def _compare(self, row: CaptureRow) -> None:
        mine = self._boundary
        if mine is not None and mine[0] == row[0] and mine != row[: len(mine)]:
            raise SourceMismatch(f"change {row[0]} is not the one that was read before", hint=_RESTORED)

    def _check(self, page: Page, after: int) -> None:
        if page.nonce not in self._nonces():
            raise SourceMismatch("the database file is an older copy of itself", hint=_RESTORED)
        if page.head < after:
            raise SourceMismatch(f"the newest change is {page.head}, but {after} was read already", hint=_RESTORED)
        if page.rows and page.rows[0][0] != after + 1:
            raise SourceMismatch(f"change {after + 1} is missing; the next is {page.rows[0][0]}", hint=_RESTORED)

    def _adopt(self, page: Page, after: int) -> None:
        """Reconcile capture with the changed schema, then load the new layouts."""
        if page.nonce not in self._nonces():
            self._load()
            return
        fits = self._reconcile(after if self._schema_version == -1 else max(after, 0))
        self._load()
        self._schema_version = fits  # if the schema changed again before `_load`, the next read detects the difference

    def _load(self) -> None:
        with sqlite_errors():
            self._db.execute("BEGIN")
            try:
                self._schema_version = _one(self._db, "PRAGMA schema_version")
                self._decoder = Decoder(read_layouts(self._db))
                self._may_nest |= may_nest(self._db)
                self._cells = capture_cells(self._db)
            finally:
                self._db.execute("COMMIT")


_RESTORED = "The file was restored or swapped: readers need a new snapshot."


@contextlib.contextmanager
def _our_tables() -> Iterator[None]:
    """Raise SourceMismatch if another program emptied or dropped our tables: the history is broken."""
    try:
        yield
    except apsw.SQLError as error:
        if OURS not in str(error):
            raise
        raise SourceMismatch(f"another program changed the capture tables: {error}", hint=_RESTORED) from error


def _one(db: apsw.Connection, sql: str) -> int:
    ((value,),) = db.execute(sql).fetchall()
    return int(str(value))


class Grouping:
    """Splitter of numbered changes into transactions: ours by their records, foreign ones by the read that saw them.

    SQLite exposes no transaction ids. All commits of other processes between two reads form one transaction
    here: a union of whole transactions, never a part of one.
    """

    def __init__(self, saw_foreign: Callable[[], None]) -> None:
        self._saw_foreign = saw_foreign
        # A transaction split by a page: its first offset, its changes so far, its commit time.
        self._open: tuple[int, int, int] | None = None

    def parts(
        self, changes: list[Numbered], own: list[OwnTransaction], head: int, now_us: int
    ) -> Iterator[Transaction]:
        """Yield the transactions, or parts of transactions, that `changes` form."""
        place = 0
        records = list(own)
        while place < len(changes):
            seq = changes[place][0]
            while records and records[0].upto < seq:
                records.pop(0)
            mine = records[0] if records and records[0].first <= seq else None
            if mine is None:
                self._saw_foreign()
            end = mine.upto if mine else records[0].first - 1 if records else head
            stop = place
            while stop < len(changes) and changes[stop][0] <= end:
                stop += 1
            yield self._part(changes[place:stop], end, mine.us if mine else now_us)
            place = stop

    def _part(self, changes: list[Numbered], end: int, us: int) -> Transaction:
        first, start, us = self._open or (changes[0][0], 0, us)
        last = changes[-1][0] == end
        self._open = None if last else (first, start + len(changes), us)
        return Transaction(
            id=str(first),
            changes=tuple(change for _, change in changes),
            first=changes[0][0],
            commit_ts_ms=us // 1000,
            start=start,
            last=last,
            position=str(changes[-1][0]),
            commit_us_rest=us % 1000,
        )
